"""Write the demo's committed texts from this Python's language reference.

Owns ``heldout.txt`` (every held-out topic, cleaned), ``document.txt`` (the
held-out topics named in ``DOCUMENT_TOPICS``, cut at a paragraph) and
``calibration.txt`` (what begins each other topic), all under ``src/stowage/demo``.
Prints what the corpus holds. Writing is deterministic for one Python version; the
committed files were written by the version in ``model/card.json``.

    python scripts/demo_corpus.py            # print sizes only
    python scripts/demo_corpus.py --write    # rewrite the three files
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from stowage.demo import corpus  # noqa: E402  (needs the path above in a bare checkout)

DOCUMENT_TOPICS = ("topic:execmodel", "topic:import", "topic:customization")
DOCUMENT_CHARS = 13_500  # about 3,000 tokens of the demo tokenizer
CALIBRATION_CHARS = 1_400  # of each topic: 40 kB in all, about 9,000 tokens of a usual tokenizer


def document(heldout: tuple[corpus.Document, ...]) -> str:
    """The demo document: whole paragraphs of ``DOCUMENT_TOPICS``, at most ``DOCUMENT_CHARS``."""
    by_name = {topic.name: topic for topic in heldout}
    kept: list[str] = []
    size = 0
    for name in DOCUMENT_TOPICS:
        for paragraph in by_name[name].paragraphs:
            size += len(paragraph) + 2
            if size > DOCUMENT_CHARS:
                return "\n\n".join(kept)
            kept.append(paragraph)
    return "\n\n".join(kept)


def calibration(train: tuple[corpus.Document, ...]) -> str:
    """Whole paragraphs, none twice: of each topic those that begin it, at most ``CALIBRATION_CHARS``."""
    kept: dict[str, None] = {}
    for topic in train:
        size = 0
        for paragraph in topic.paragraphs:
            size += len(paragraph) + 2
            if size > CALIBRATION_CHARS:
                break
            kept.setdefault(paragraph)
    return "\n\n".join(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite heldout.txt, document.txt and calibration.txt")
    options = parser.parse_args()
    built = corpus.build_corpus()
    for part, documents in (("train", built.train), ("held-out", built.heldout)):
        chars = sum(len(d.text) for d in documents)
        print(f"{part}: {len(documents)} documents, {chars} characters")
    print("held-out topics:", ", ".join(d.name for d in built.heldout))
    if options.write:
        heldout = "\n\n".join(d.text for d in built.heldout) + "\n"
        (corpus.HERE / "heldout.txt").write_text(heldout, encoding="utf-8")
        (corpus.HERE / "document.txt").write_text(document(built.heldout) + "\n", encoding="utf-8")
        topics = tuple(d for d in built.train if d.name.startswith("topic:"))
        (corpus.HERE / "calibration.txt").write_text(calibration(topics) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
