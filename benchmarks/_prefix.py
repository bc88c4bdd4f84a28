"""What benchmarks of one shared prefix have in common: options, the model, a directory, where the result goes."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks._report import write_result


def run(
    name: str, about: str | None, measure: Callable[[Any, int, int, Path], Any], report: Callable[[Any], dict[str, Any]]
) -> None:
    """`measure` is given the model, the prefix's tokens, the rounds and a directory; `report` what it found."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix-tokens", type=int, default=4096)
    parser.add_argument("--dtype", default=models.native_dtype(), choices=["bfloat16", "float32"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
        found = measure(models.half_billion(options.dtype), options.prefix_tokens, options.rounds, Path(directory))
    write_result(name, report(found) | vars(options))
