"""How a checkpoint of sentence-transformers makes one vector of a text: read from its own files.

    tokens -> Transformer -> hidden states [tokens, width] -> Pooling [width] -> Dense, Normalize -> [dimension]

Owns what of ``modules.json`` and the folders that it names is understood; anything else is refused, because the vector
would be another one (the format: https://sbert.net/docs/sentence_transformer/usage/custom_models.html).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stowage.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

_MODULES = "modules.json"
_MODES = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}
"""By the end of each switch of a pooling's configuration, the mode's newer name; vectors are joined in this order."""
_ACTIVATIONS = ("Identity", "Tanh")


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer after pooling, and what is done to its result."""

    weight: Tensor
    bias: Tensor | None
    activation: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What follows the model. ``modes``: of pooling, whose vectors are joined; ``then``: a ``Dense``, or None for a
    vector of length one. ``prompt``: text before each text. ``tokens_max``: 0 where the files do not say.
    """

    modes: tuple[str, ...]
    then: tuple[Dense | None, ...] = ()
    prompt: str = ""
    lower: bool = False
    tokens_max: int = 0

    def vector(self, hidden: Tensor) -> Tensor:
        """Of a text's ``hidden`` states ``[tokens, width]``: its vector ``[dimension]``, in float32."""
        import torch

        found = torch.cat([_pooled(mode, hidden.float()) for mode in self.modes])
        for layer in self.then:
            if layer is None:
                found = found / found.norm().clamp_min(1e-12)
                continue
            found = torch.nn.functional.linear(found, layer.weight, layer.bias)
            found = found.tanh() if layer.activation == "Tanh" else found
        return found


def _pooled(mode: str, hidden: Tensor) -> Tensor:
    """``[width]`` of ``[tokens, width]``, as ``Pooling`` of sentence-transformers has it for a text without padding."""
    import torch

    tokens = hidden.shape[0]
    if mode == "cls":
        return hidden[0]
    if mode == "lasttoken":
        return hidden[-1]
    if mode == "max":
        return hidden.amax(0)
    if mode == "weightedmean":
        weights = torch.arange(1, tokens + 1, dtype=torch.float32)[:, None]
        return (hidden * weights).sum(0) / weights.sum()
    return hidden.sum(0) / (tokens if mode == "mean" else tokens**0.5)


def is_embedding_model(directory: Path) -> bool:
    """Whether the checkpoint in ``directory`` says how it makes a vector of a text."""
    try:
        return any(_kind(module) == "Pooling" for module in _read(directory / _MODULES))
    except (CheckpointError, TypeError, AttributeError):
        return False


def read_pipeline(directory: Path) -> Pipeline:
    """Raises ``CheckpointError`` for files that are missing or damaged, ``UnsupportedModelError`` for unknown parts."""
    if not (directory / _MODULES).is_file():
        raise UnsupportedModelError(
            f"{directory} has no {_MODULES}, so nothing says how it makes a vector of a text. Give a checkpoint of "
            "sentence-transformers; a model that generates has no embeddings."
        )
    modes: tuple[str, ...] = ()
    then: list[Dense | None] = []
    try:
        for module in _read(directory / _MODULES):
            kind, folder = _kind(module), _folder(directory, str(module["path"]))
            if kind == "Pooling":
                modes = _modes(_read(folder / "config.json"))
            elif kind == "Dense":
                then.append(_dense(folder))
            elif kind == "Normalize":
                then.append(None)
            elif kind != "Transformer" or folder != directory:
                raise UnsupportedModelError(f"{directory / _MODULES} names a {kind} that is not supported.")
        if not modes:
            raise UnsupportedModelError(f"{directory / _MODULES} names no Pooling, so there is no vector of a text.")
        return _with_texts(directory, modes, tuple(then))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{directory / _MODULES} is damaged ({error!r}); download the checkpoint again."
        ) from error


def _with_texts(directory: Path, modes: tuple[str, ...], then: tuple[Dense | None, ...]) -> Pipeline:
    """With what is done to a text before."""
    own, whole = directory / "sentence_bert_config.json", directory / "config_sentence_transformers.json"
    said = _read(own) if own.is_file() else {}
    prompts = _read(whole) if whole.is_file() else {}
    named = prompts.get("default_prompt_name")
    prompt = str(prompts["prompts"][named]) if named else ""
    longest = said.get("max_seq_length") or 0
    return Pipeline(modes, then, prompt, bool(said.get("do_lower_case", False)), int(longest))


def _modes(config: dict[str, Any]) -> tuple[str, ...]:
    if config.get("include_prompt") is False:
        raise UnsupportedModelError("its pooling leaves out the prompt's tokens (include_prompt): not supported.")
    named = config.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else list(named or [])
    switched = [mode for switch, mode in _MODES.items() if config.get(f"pooling_mode_{switch}")]
    found = tuple(mode for mode in _MODES.values() if mode in (chosen or switched))
    if not found or set(chosen) - set(_MODES.values()):
        raise UnsupportedModelError(f"its pooling is {chosen or 'none'}; known are: {', '.join(_MODES.values())}.")
    return found


def _dense(folder: Path) -> Dense:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    activation = str(_read(folder / "config.json").get("activation_function", "Identity")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{folder} has the activation {activation}; known are {', '.join(_ACTIVATIONS)}.")
    try:
        tensors = load_file(folder / "model.safetensors")
        bias = tensors.get("linear.bias")
        return Dense(tensors["linear.weight"].float(), None if bias is None else bias.float(), activation)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder} has no whole model.safetensors: {error}") from error


def _kind(module: dict[str, Any]) -> str:
    return str(module["type"]).rpartition(".")[2]


def _folder(directory: Path, name: str) -> Path:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{directory / _MODULES} names a folder outside of the checkpoint: {name}")
    return directory / name


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); download the checkpoint again.") from error
