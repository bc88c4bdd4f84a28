"""Activations in 8 bits: what is multiplied with weights in integer formats is rounded, and multiplied as integers.

    32 activations                  ->   a scale in float32, 32 whole numbers from -127 to 127   (dynamic quantization)
    what attention weighs with      ->   bfloat16, where a model computes in that; of tokens from ROUNDED_FROM on

Owns where that is possible, and what is told of it. An answer is not that of the published weights in bfloat16 then;
but it still depends on nothing that offloading, caching or batching decides. The kernels do it (``kernels``), asked by
``RowInvariance`` and by attention; keys of stored KV say so (``INT8_NAME``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from stowage.errors import ConfigError
from stowage.executor import kernels
from stowage.weights.quantized.codes import form_of
from stowage.weights.quantized.formats import PLAIN

INT8_NAME: Final = "int8-activations/2"
"""Raised when the way of rounding changes."""
ROUNDED_FROM: Final = 256
"""The position from which on attention's weights are rounded. Of many keys the errors even out, and these take the
time; of few keys the answer to a short question may hang on them.
"""


def check_int8(model: Any) -> None:
    """Raise ``ConfigError`` where activations cannot be rounded."""
    if model.device.type != "cpu":
        raise ConfigError(
            f"int8_activations is for CPUs, and the model is on {model.device}. Leave it out, or give --device cpu."
        )
    if not kernels.wanted(model.device, model.dtype):
        why = "they were not built, or STOWAGE_PURE_PYTHON is set"
        if model.dtype not in kernels.DTYPES:
            why = f"there are none for {model.dtype}"
        raise ConfigError(
            f"int8_activations needs Stowage's kernels, and {why}. Leave it out, or give --dtype bfloat16 where the "
            "package was installed with a C compiler."
        )


def int8_note(model: Any) -> str:
    """What it means for ``model``."""
    formats = {spec.name for module in model.modules() for spec in getattr(module, "block_specs", ())}
    packed = any(form_of(name) for name, _ in model.named_parameters())
    return note_of(formats, packed=packed, half=model.dtype is torch.bfloat16)


def note_of(formats: Iterable[str], *, packed: bool = False, half: bool = True) -> str:
    """The same of matrices in these ``formats``; ``packed``: whether there are some of `stowage pack` too; ``half``:
    whether the model computes in bfloat16.
    """
    others = set(formats) - kernels.INTEGER_FORMATS
    if not packed and others == set(formats):
        changes = "only how attention weighs values, rounded to bfloat16" if half else "nothing"
        return f"--int8-activations changes {changes}: no weights of this model are in a format that is multiplied so."
    beside = f"; weights in {', '.join(sorted(others))} are multiplied as ever" if others - PLAIN.keys() else ""
    return (
        "Activations are rounded to 8 bits: answers are close to those of the published weights, and not the same"
        f"{beside}."
    )
