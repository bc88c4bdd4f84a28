"""Quantizes a model's linear layers and experts with calibration text: each matrix is fitted to its inputs.

Backward passes over some of the text come first; their gradients weight the tokens by how much an error matters there.
In some layers one token in hundreds matters as much as all others: the attention sink.

Owns an unnamed temporary file for the packed bytes, which may exceed memory. The model runs with its original weights
meanwhile, within the given budgets.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from torch import Tensor

from stowage.config.memory import Memory
from stowage.engine.memory_budget import weights_budget
from stowage.errors import ModelError
from stowage.evaluation import sensitivity
from stowage.models import loading
from stowage.models.state_access import keeper_of
from stowage.weights.file import pwrite_all
from stowage.weights.parameter_location import memory_of
from stowage.weights.quantized.codes import Form
from stowage.weights.quantized.fitting import Inputs
from stowage.weights.quantized.modules import Target, targets
from stowage.weights.quantized.stacks import DOWN, up_projection
from stowage.weights.safetensors_file import not_taken

_WINDOW_TOKENS: Final = 512
_WINDOWS: Final = 16
_WINDOWS_BACKWARDS: Final = 2
_TOKENS_LEAST: Final = 32

Progress = Callable[[str, int, int], None]


class Fitted:
    """Packed matrices. ``forms``: the form of every matrix, by path, whether it was fitted or not."""

    def __init__(self, directory: Path) -> None:
        self.forms: dict[str, str] = {}
        self._directory = directory
        self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115  # closed by `close`
        self._spans: dict[str, tuple[int, int]] = {}
        self._used_bytes = 0

    def put(self, path: str, packed: Tensor) -> None:
        """Raises StorageError."""
        try:
            pwrite_all(self._file.fileno(), memory_of(packed), self._used_bytes)
        except OSError as error:
            raise not_taken(self._directory, error) from error
        self._spans[path] = (self._used_bytes, packed.nbytes)
        self._used_bytes += packed.nbytes

    def packed(self, target: Target, values: Tensor, otherwise: str) -> tuple[Form, Tensor]:
        """The form and bytes of ``target``: fitted to its inputs if calibrated, else ``otherwise``, from ``values``."""
        form = target.form(self.forms.get(target.path, otherwise))
        span = self._spans.get(target.path)
        if span is None:
            return form, target.pack(values, form)
        self._file.seek(span[0])
        content = torch.from_numpy(np.fromfile(self._file, np.uint8, span[1]))
        return form, content.view(target.shape(form))

    def close(self) -> None:
        self._file.close()


def fit(
    model: str,
    memory: Memory,
    text: str,
    form: str | float,
    directory: Path,
    progress: Progress = lambda _what, _done, _all: None,
) -> Fitted:
    """The linear layers of ``model`` as ``form`` or, where that is a number, each in the form that is chosen for it, so
    that a weight takes so many bits on average. The model lies within the budgets of ``memory``, and reads up to 8,192
    tokens from the beginning of ``text``. ``directory``: where the packed bytes wait.

    Raises ConfigError where a form has more bits than are allowed, ModelError without a tokenizer or with too short a
    text, and whatever loading raises.
    """
    loaded = _load(model, memory)
    fitted = Fitted(directory)
    try:
        keeper_of(loaded.model).keep_weights(loaded.model)  # they are packed as they are in the checkpoint
        windows = _windows(loaded, model, text)
        found = list(targets(loaded.model))
        if isinstance(form, float):
            sensitivity.refuse_few(found, form)
        calibration = _Calibration(loaded.model, windows, found, progress)
        if isinstance(form, float):
            fitted.forms = sensitivity.chosen(sensitivity.packables(found, calibration.divergences()), form)
        else:
            fitted.forms = {target.path: target.form(form).name for target in found}
        calibration.fit(fitted)
        return fitted
    except BaseException:
        fitted.close()
        raise
    finally:
        _close(loaded)


def _load(model: str, memory: Memory) -> Any:
    """Load the model, with whole layers streamed where budgets do not hold it: expert caches have no backward pass."""
    if not memory.places_weights:
        return loading.load(model)
    loaded = loading.load(model, budget=partial(weights_budget, memory, None))
    if loaded.weights is None or not loaded.weights.placement.cached:
        return loaded
    _close(loaded)
    return loading.load(model, budget=partial(weights_budget, replace(memory, weights="*=stream"), None))


def _close(loaded: Any) -> None:
    if loaded.weights is not None and loaded.owns_weights:
        loaded.weights.close()


def _windows(loaded: Any, model: str, text: str) -> Tensor:
    """[windows, tokens]"""
    if loaded.tokenizer is None:
        raise ModelError(f"{model} has no tokenizer, so it reads no text to fit its matrices to.")
    ids = torch.tensor(list(loaded.tokenizer.encode(text)), dtype=torch.long)
    context = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or _WINDOW_TOKENS
    length = min(_WINDOW_TOKENS, int(context), len(ids))
    if length < _TOKENS_LEAST:
        raise ModelError("the text is too short to fit matrices to: --eval FILE takes a longer one.")
    count = min(_WINDOWS, len(ids) // length)
    return ids[: count * length].view(count, length)


class _Calibration:
    """Runs ``model`` on ``windows`` [windows, tokens], and collects the inputs of its layers."""

    def __init__(self, model: Any, windows: Tensor, found: Sequence[Target], progress: Progress) -> None:
        self._model, self._windows, self._progress = model, windows, progress
        self._gradients = sensitivity.gradients(
            model, found, windows[:_WINDOWS_BACKWARDS], partial(progress, "measuring")
        )
        self._layers = [target for target in found if target.path in self._gradients]
        self._experts = [target for target in found if target.experts]

    def divergences(self) -> dict[str, dict[str, float]]:
        """The expected divergence of each layer in each form, by path and form, in nats per token."""
        found = {}

        def tell(target: Target, weight: Tensor, inputs: Iterator[Inputs | None]) -> None:
            if (known := next(inputs)) is not None:
                found[target.path] = self._gradients[target.path].divergences(target, weight, known)

        self._read(self._layers, tell, "choosing")
        return found

    def fit(self, fitted: Fitted) -> None:
        """Pack the matrices whose form in ``fitted`` has fewer than 8 bits."""

        def pack(target: Target, weight: Tensor, inputs: Iterator[Inputs | None]) -> None:
            fitted.put(target.path, target.pack(weight, target.form(fitted.forms[target.path]), inputs))

        layers = [*self._layers, *self._experts]
        self._read([target for target in layers if fitted.forms[target.path] != "int8"], pack, "fitting")

    @torch.no_grad()
    def _read(
        self, layers: Sequence[Target], use: Callable[[Target, Tensor, Iterator[Inputs | None]], None], what: str
    ) -> None:
        """Calls ``use`` with each of ``layers``, its weight, and its inputs, when the model first calls the layer; for
        stacked experts, with the inputs of each expert.
        """
        waiting = {target.path for target in layers}

        def compute(target: Target, layer: Any, given: tuple[Tensor, ...], _out: Tensor) -> None:
            if target.path in waiting:
                waiting.remove(target.path)
                inputs = _of_experts(target, given) if target.experts else self._of_layer(target, given[0])
                use(target, getattr(layer, target.own).detach().cpu(), inputs)
                self._progress(what, len(layers) - len(waiting), len(layers))

        takes = inspect.signature(self._model.forward).parameters
        options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._progress(what, 0, len(layers))
        with contextlib.ExitStack() as hooks:
            for target in layers:
                # before other hooks: one of them may take the weight away again
                handle = target.module.register_forward_hook(partial(compute, target), prepend=True)
                hooks.callback(handle.remove)
            self._model(input_ids=self._windows, use_cache=False, **options)

    def _of_layer(self, target: Target, given: Tensor) -> Iterator[Inputs | None]:
        rows = given.reshape(-1, target.inputs).cpu()
        counts = self._gradients[target.path].counts.repeat(len(self._windows))
        yield Inputs.of(rows, counts) if len(rows) == len(counts) else None


def _of_experts(target: Target, given: Sequence[Tensor]) -> Iterator[Inputs | None]:
    """The inputs of each expert: the tokens that chose it, weighted by the square of their routing weights."""
    if len(given) < 3 or given[1].shape != given[2].shape:
        return  # another kind: its experts are fitted to their values alone
    hidden, chosen, shares = given[:3]
    for expert in range(target.experts):
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        if len(tokens) < _TOKENS_LEAST:
            yield None
            continue
        rows = hidden[tokens]
        if target.own == DOWN:
            rows = up_projection(target.module, expert, rows)
        yield Inputs.of(rows.cpu(), shares[tokens, place].float().square().cpu())
