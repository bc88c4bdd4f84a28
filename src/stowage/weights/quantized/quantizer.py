"""Makes Transformers build models whose modules are replaced before loading, by our name in ``quantization_config``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_Before = Callable[[Any, Any, torch.dtype, Sequence[str]], Any]


def register(method: str, before: _Before, after: Callable[[Any, Any], None] | None = None) -> None:
    """Models whose ``quantization_config`` has the ``quant_method`` ``method`` are built so: ``before(model, config,
    dtype, files)`` replaces modules, none of which has values yet; ``after(model, what before returned)`` may look at
    them when they have. May be called again.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if method in AUTO_QUANTIZER_MAPPING:
        return

    class Config(QuantizationConfigMixin):  # type: ignore[misc]
        def __init__(self, **stated: Any) -> None:
            self.__dict__.update(stated, quant_method=method)

        def to_dict(self) -> dict[str, Any]:
            """What a config.json can hold of it."""
            return {name: value for name, value in self.__dict__.items() if isinstance(value, str | int)}

        def to_diff_dict(self) -> dict[str, Any]:
            return self.to_dict()

        def __deepcopy__(self, _memo: Any) -> Any:
            return self

    class Quantizer(HfQuantizer):  # type: ignore[misc]
        def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
            self._dtype = dtype
            return dtype

        def _process_model_before_weight_loading(self, model: Any, **given: Any) -> None:
            files = given.get("checkpoint_files") or []
            self._known = before(model, self.quantization_config, self._dtype, files)

        def _process_model_after_weight_loading(self, model: Any, **_given: Any) -> Any:
            for module in model.modules():  # our layers have weights, so that none is computed in another way
                vars(getattr(module, "config", module)).pop("_is_quantized", None)
            if after is not None:
                after(model, self._known)
            return model

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    register_quantization_config(method)(Config)
    register_quantizer(method)(Quantizer)
