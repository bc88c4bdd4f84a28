"""What NVIDIA's Model Optimizer says beside config.json: hf_quant_config.json, as ``quantization_config`` would say it.

Needs no torch, and knows no method: what is read is decided there (``method``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stowage.errors import CheckpointError

_FILE: Final = "hf_quant_config.json"


def hf_quant_config(directory: Path) -> dict[str, Any] | None:
    """The ``quantization_config`` of a checkpoint whose config.json has none; ``None`` where no weights are said to be
    quantised. Raises CheckpointError for a file that cannot be read.
    """
    path = directory / _FILE
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again.") from error
    stated = entries.get("quantization") if isinstance(entries, Mapping) else None
    if not isinstance(stated, Mapping) or not stated.get("quant_algo"):
        return None
    return {"quant_method": "modelopt", **stated}
