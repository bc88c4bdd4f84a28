"""Chooses the bits of each matrix of a model: few where quantization changes the answers little per byte saved.

Forward and backward passes over some text give the gradient of each linear layer's outputs at each token (Fisher
information, for tokens drawn from the model's own distribution). With the layer's inputs and the quantization errors of
a form this gives the expected mean Kullback-Leibler divergence of that form. Divergences of several layers are assumed
to add up; bytes go where they reduce the sum most. Stacked experts are not measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from stowage.errors import ConfigError
from stowage.weights.quantized import fitting
from stowage.weights.quantized.codes import Form
from stowage.weights.quantized.fitting import Inputs
from stowage.weights.quantized.grids import GRIDS
from stowage.weights.quantized.modules import Target

_EXPERTS: Final = ("int4_64", "int4_32")
_FORMS: Final = ("int8", "int4_128", "q4_0", "q4_k", "q5_0", "q5_k")
"""The candidate forms of a linear layer: others have a larger divergence for the same bits."""
_OUTPUTS_MEASURED: Final = 128
"""Outputs of a matrix that are measured, evenly spaced: all would take as long as packing it in each form."""
_LEVELS_OF_INT8: Final = 254
"""Steps between the least and the greatest weight of an output."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A form of a matrix, its bytes, and its expected divergence in nats per token."""

    form: str
    nbytes: int
    divergence: float = 0.0


@dataclass(frozen=True, slots=True)
class Packable:
    """A matrix of ``weights`` weights, and its possible forms; a single one means that there is no choice."""

    path: str
    weights: int
    choices: tuple[Choice, ...]


def packables(targets: Sequence[Target], divergences: Mapping[str, Mapping[str, float]]) -> list[Packable]:
    """The possible forms of each of ``targets``, except the output layer, which has no choice and does not count.
    ``divergences``: the measured ones, by path and form.
    """
    found = []
    for target in targets:
        if target.head:
            continue
        known = divergences.get(target.path, {})
        names = tuple(known) or tuple(n for n in _EXPERTS if target.form(n).name == n)[: 1 if target.experts else 0]
        forms = {target.form(name).name: target.form(name) for name in names or ("int8",)}
        count = max(1, target.experts)
        choices = [Choice(n, count * form.nbytes, known.get(n, 0.0)) for n, form in forms.items()]
        found.append(Packable(target.path, count * target.outputs * target.inputs, tuple(choices)))
    return found


def chosen(matrices: Sequence[Packable], bits: float) -> dict[str, str]:
    """The form of each matrix, by path, so that a packed weight takes at most ``bits`` on average, with scales.

    Raises ConfigError where even the fewest take more.
    """
    least = {one.path: min(one.choices, key=lambda choice: choice.nbytes) for one in matrices}
    weights, used = sum(one.weights for one in matrices), sum(choice.nbytes for choice in least.values())
    allowed = bits * weights / 8
    if not used <= allowed:  # nor is any number of bytes at most NaN
        raise ConfigError(
            f"--bits {bits:g} is less than weights in 4 bits take here with their scales, and with what has to be in 8 "
            f"bits: give {8 * used / weights + 0.005:.2f} or more."
        )
    forms = {path: choice.form for path, choice in least.items()}
    steps = [(path, step) for path, steps in _steps(matrices, least) for step in steps]
    ended = set[str]()
    for path, (_saved, more_bytes, form) in sorted(steps, key=lambda one: one[1][0], reverse=True):
        if path not in ended and used + more_bytes <= allowed:
            used += more_bytes
            forms[path] = form
        else:
            ended.add(path)  # its next step begins where this one would have led
    return forms


def _steps(
    matrices: Sequence[Packable], least: Mapping[str, Choice]
) -> Iterator[tuple[str, list[tuple[float, int, str]]]]:
    """The steps from a matrix's smallest form to its largest: divergence saved per byte, further bytes, form. Forms
    below the convex hull are left out, so each step saves less per byte than the one before.
    """
    for one in matrices:
        at, steps = least[one.path], list[tuple[float, int, str]]()
        while True:
            larger = [c for c in one.choices if c.nbytes > at.nbytes and c.divergence < at.divergence]
            if not larger:
                break
            saved, following = max(
                (((at.divergence - c.divergence) / (c.nbytes - at.nbytes), c) for c in larger), key=lambda pair: pair[0]
            )
            steps.append((saved, following.nbytes - at.nbytes, following.form))
            at = following
        yield one.path, steps


def refuse_few(targets: Sequence[Target], bits: float) -> None:
    """Raises ConfigError where no forms of ``targets`` take so few ``bits``: before they are measured."""
    chosen(packables(targets, {t.path: {f.name: 0.0 for f in forms_of(t)} for t in targets if is_measured(t)}), bits)


@dataclass(slots=True)
class Gradients:
    """Squared gradients of a linear layer's outputs: ``tokens`` (tokens,), by position in a window, summed over
    outputs; ``outputs`` (outputs,), summed over tokens. ``read``: the number of tokens.
    """

    tokens: Tensor | float = 0.0
    outputs: Tensor | float = 0.0
    read: int = 0

    @property
    def counts(self) -> Tensor:
        """The weight of an error at each position: (tokens,). Single gradients are noisy, so positions are averaged in
        groups: 0, 1 and 2, 3 to 6, 7 to 14 and so on. Earlier tokens are attended to by more tokens, and the first one
        is the attention sink.
        """
        assert isinstance(self.tokens, Tensor)
        found, begin = torch.empty_like(self.tokens), 0
        while begin < len(found):
            end = 2 * begin + 1
            found[begin:end] = self.tokens[begin:end].mean()
            begin = end
        return found

    def add(self, gradient: Tensor) -> None:
        squares = gradient.detach().reshape(-1, gradient.shape[-1]).float().square().cpu()
        self.tokens, self.outputs = self.tokens + squares.sum(dim=1), self.outputs + squares.sum(dim=0)
        self.read += len(squares)

    def divergences(self, target: Target, weight: Tensor, inputs: Inputs) -> dict[str, float]:
        """The expected divergence of each possible form of ``target``, in nats per token."""
        assert isinstance(self.outputs, Tensor)
        found, some = {}, slice(0, None, -(-target.outputs // _OUTPUTS_MEASURED))
        counted = self.outputs[some]
        share = counted.sum() / self.outputs.sum().clamp(min=torch.finfo(torch.float32).tiny)
        for form in forms_of(target):
            counts = inputs.weights if form.name == "int8" else inputs.remaining
            error = (_error(weight[some], counts, form) * counted).sum() / (2 * self.read)
            found[form.name] = float(error / share) if share > 0 else 0.0
        return found


def gradients(
    model: Any, targets: Sequence[Target], windows: Tensor, progress: Callable[[int, int], None]
) -> dict[str, Gradients]:
    """The gradients of those ``targets`` that are called for all ``windows`` [windows, tokens], by path."""
    found = {target.path: Gradients() for target in targets if is_measured(target)}
    model.requires_grad_(False)

    def keep(path: str, _layer: Any, _given: Any, out: Any) -> None:
        if out.requires_grad:
            out.register_hook(found[path].add)

    generator = torch.Generator().manual_seed(0)
    embedded = _embedded(model, windows)
    with contextlib.ExitStack() as hooks, torch.enable_grad():
        for target in targets:
            if target.path in found:
                hooks.callback(target.module.register_forward_hook(partial(keep, target.path)).remove)
        for number, window in enumerate(embedded):
            progress(number, len(windows))
            given = window[None].detach().clone().requires_grad_()
            logits = model(inputs_embeds=given, use_cache=False).logits[0].float()
            drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
            loss = nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")
            torch.autograd.backward(loss)
    progress(len(windows), len(windows))
    return {path: one for path, one in found.items() if one.read == windows.numel()}


@torch.no_grad()
def _embedded(model: Any, windows: Tensor) -> Tensor:
    """The embeddings of ``windows``, which require gradients, so that the model computes a backward pass."""
    found: list[Tensor] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _module, _given, out: found.append(out))
    try:
        model(input_ids=windows, use_cache=False)
    finally:
        handle.remove()
    return found[0]


def forms_of(target: Target) -> list[Form]:
    """The possible forms of a linear layer."""
    forms = [Form(name, target.outputs, target.inputs) for name in _FORMS]
    return [form for form in forms if form.fits]


def is_measured(target: Target) -> bool:
    """Whether its form can be chosen: experts' and the output layer's cannot."""
    return not target.experts and not target.head


def _error(weight: Tensor, counts: Tensor, form: Form) -> Tensor:
    """The squared error of each output, weighted by each input's ``counts``, without compensation: (outputs,)."""
    values = weight.float().contiguous()
    if form.name == "int8":
        steps = 2 * values.abs().amax(dim=1) / _LEVELS_OF_INT8
        return steps.square() / 12 * counts.sum()
    return fitting.errors(values, GRIDS[form.name], counts)
