"""8-bit activations (dynamic quantization): the inputs of weights in integer formats are quantized at run time.

    32 activations       ->   a float32 scale and 32 integers from -127 to 127
    attention weights    ->   bfloat16, if the model computes in that; for tokens from ROUNDED_FROM on

Owns where that is possible, and the note for users. Answers are no longer those of the published weights in bfloat16,
but still do not depend on offloading, caching or batching. The kernels (``kernels``) do it, called by ``RowInvariance``
and by attention; the namespace of stored KV contains ``INT8_NAME``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from stowage.errors import ConfigError
from stowage.executor import kernels
from stowage.weights.quantized.blocks import packings
from stowage.weights.quantized.codes import form_of
from stowage.weights.quantized.formats import PLAIN, Spec

INT8_NAME: Final = "int8-activations/2"
"""Version of the rounding."""
ROUNDED_FROM: Final = 256
"""Attention weights are rounded from this position on. With many keys the errors average out, and rounding saves time;
with few keys they may change a short answer.
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
    """What 8-bit activations mean for ``model``, for users."""
    formats = {spec.name for spec in packings(model) if isinstance(spec, Spec)}
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
