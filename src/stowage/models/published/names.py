"""Which tensors of a checkpoint's files are which parameter of Transformers' model.

Transformers knows how checkpoints of each family were named, and which of their matrices it stacks
(``conversion_mapping``). That is asked here, of names alone: a parameter is one matrix, or experts' matrices one after
the other. Any other conversion computes with values, so its parameter does not lie in the files. Tools that quantise
linear layers take apart what a family has stacked, such as Llama 4's experts: llm-compressor names them so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stowage.errors import UnsupportedModelError

_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")
_APART: Final = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_PART_OF: Final = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", 0)}


@dataclass(slots=True)
class Sources:
    """What a parameter is made of: one name, or by expert the names whose rows follow each other."""

    single: str = ""
    experts: dict[int, dict[int, str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [self.single, *(name for parts in self.experts.values() for name in parts.values())]


def sources_of(model: Any, names: Iterable[str], renamed: Mapping[str, str] | None) -> dict[str, Sources]:
    """By parameter of ``model`` the ``names`` in its files that it is made of; what is no parameter's is left out.

    ``renamed``: see ``TextPart``. Raises UnsupportedModelError for parameters that are computed from what is in files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    transforms = get_model_conversion_mapping(model, key_mapping=dict(renamed) if renamed else None)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    others = [each for each in transforms if not isinstance(each, WeightConverter)]
    owners = {pattern: each for each in converters for pattern in each.source_patterns}
    parameters = model.state_dict()
    found = dict[str, Sources]()
    for name in names:
        path, pattern = rename_source_key(name, others, converters, model.base_model_prefix, parameters)
        if path not in parameters and name in parameters:
            path, pattern = name, None
        if (apart := _APART.fullmatch(path)) is not None and path not in parameters:
            own, number = _PART_OF[apart[3]]
            if f"{apart[1]}.{own}" in parameters:
                _refuse_in_turn(model, apart[1], name)
                found.setdefault(f"{apart[1]}.{own}", Sources()).experts.setdefault(int(apart[2]), {})[number] = name
            continue
        if path not in parameters:
            continue
        sources = found.setdefault(path, Sources())
        if pattern is None:
            sources.single = name
            continue
        expert = _EXPERT.search(name)
        if expert is None or not _stacks(owners[pattern]):
            raise UnsupportedModelError(
                f"{path} is computed from {name} and others when the model is loaded, so it cannot be read as it lies."
            )
        number = owners[pattern].source_patterns.index(pattern)
        sources.experts.setdefault(int(expert[1]), {})[number] = name
    return found


def _refuse_in_turn(model: Any, experts: str, name: str) -> None:
    """Raises UnsupportedModelError for a family whose experts' gates do not lie above what they gate."""
    if not getattr(model.get_submodule(experts), "is_concatenated", True):
        raise UnsupportedModelError(
            f"{name} is one expert's, and the model computes with {experts} stacked, a row of a gate and of what it "
            "gates in turn, which is not read from matrices that lie apart. Give the original checkpoint, or a GGUF "
            "file."
        )


def _stacks(converter: Any) -> bool:
    """Whether it puts experts' matrices one after the other, of each expert one below the other."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [type(operation) for operation in converter.operations]
    dims = [operation.dim for operation in converter.operations] if len(kinds) <= 2 else []
    return (kinds == [MergeModulelist] and dims == [0] and len(converter.source_patterns) == 1) or (
        kinds == [MergeModulelist, Concatenate] and dims == [0, 1]
    )
