"""The demo's committed texts and model: English of Python's language reference, of which some topics are held out.

Owns their paths. ``scripts/demo_corpus.py`` wrote the texts, of the corpus that the model is trained on; topics differ
between Python versions, so results that must be reproducible use these files, never the installation.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent


def heldout_text() -> str:
    """The committed held-out sample: cleaned held-out topics, never trained on."""
    return (HERE / "heldout.txt").read_text(encoding="utf-8")


def document_text() -> str:
    """The committed long document for the demo: part of the held-out topics."""
    return (HERE / "document.txt").read_text(encoding="utf-8")


def calibration_text() -> str:
    """The committed text that `stowage pack` fits matrices to: of training topics, which quote no held-out one."""
    return (HERE / "calibration.txt").read_text(encoding="utf-8")


def model_path() -> Path:
    """The folder of the committed model, for ``AutoModelForCausalLM.from_pretrained``: in a clone, not in a wheel."""
    return HERE / "model"
