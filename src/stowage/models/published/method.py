"""Reads ``quantization_config``: how a checkpoint was quantised by others, and which parameters are, by name.

Owns the methods that are read, and refuses what is not, by name. Knows no file: what is in one is found there
(``matrices``), and this is what is counted with where there is none.

Sources: Transformers' ``utils/quantization_config.py``; compressed-tensors' ``QuantizationConfig``; Model Optimizer's
``convert_hf_quant_config_format``; the documentation of GPTQModel and AutoAWQ.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from stowage.errors import CheckpointError, UnsupportedModelError
from stowage.weights.quantized.formats import MXFP4_GROUP, NVFP4_GROUP, Spec
from stowage.weights.quantized.stacks import has_transposed_experts

METHODS: Final = ("fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "modelopt", "gptq", "awq")
_ALGORITHMS: Final = ("NVFP4", "W4A16_NVFP4", "FP8")
"""Those of ``modelopt``."""
_MIXED: Final = "MIXED_PRECISION"
_FP4: Final = ("float", 4)
_INT4: Final = ("int", 4)
_WHOLE: Final = (_INT4, ("int", 8))
_AUTO_ROUND: Final = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""In whose layout AutoRound writes, by its ``packing_format``."""
_EXTRA: Final = "extra_config"
"""Where AutoRound says of single layers that they have other bits."""
_UNQUANTISED: Final = 16
_SECOND: Final = "gptq_v2"
_SEMANTICS: Final = "weight_scale_semantics"
_PACKED: Final = (None, "pack-quantized", "mixed-precision")
"""Formats of compressed-tensors in which whole numbers are packed into words; one says it of each of its groups."""
_BYTES: Final = ("int-quantized", "naive-quantized")
"""Those in which each has a byte, also of fewer bits."""
_OURS: Final = "stowage_pack"
_LAYERS: Final = re.compile(r"\.(?:layers|blocks|h)\.\d+\.")
_LEFT: Final = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
"""How configs call what was not quantised."""
_HEAD: Final = ("lm_head", "embed_out", "output_layer")
_NO_TRANSFORMS: Final = "which would have to be undone at every step"


@dataclass(frozen=True, slots=True)
class Method:
    """How a checkpoint was quantised. ``name``: one of ``METHODS``; ``stated``: the rest of what the config says."""

    name: str
    stated: Mapping[str, Any]

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale of FP8; 0 is all of them."""
        size = self.stated.get("weight_block_size") or next(filter(None, map(_block, self._weights())), None)
        if isinstance(size, Sequence) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size):
            return size[0], size[1]
        return 0, 0

    @property
    def groups(self) -> set[int]:
        """Sizes that groups of inputs are said to have, of whole numbers of 4 bits."""
        sizes = self.stated.get("group_size"), self.stated.get("q_group_size")
        return {*map(_count, (*sizes, *(weights.get("group_size") for weights in self._weights())))} - {0}

    @property
    def second(self) -> bool:
        """Whether GPTQ's second format is stated, which stores zero points as they are."""
        return self.name == "gptq" and str(self.stated.get("checkpoint_format")).lower() == _SECOND

    @property
    def has_zeros(self) -> bool:
        """Whether all matrices of whole numbers that compressed-tensors wrote have zero points."""
        whole = self._whole(in_bytes=False)
        return all(weights.get("symmetric") is False for weights in whole) and any(whole)

    def is_ordered(self, *, in_bytes: bool) -> bool:
        """Whether all matrices have their inputs put into groups in an order of their own (act-order). ``in_bytes``:
        of compressed-tensors those whose whole numbers have a byte each.
        """
        orders = [str(weights.get("actorder")).lower() in ("group", "dynamic") for weights in self._whole(in_bytes)]
        return all(orders) if orders else self.name == "gptq" and self.stated.get("desc_act") is True

    def check(self) -> None:
        """Raises UnsupportedModelError for what is not read."""
        if self.name == "compressed-tensors":
            self._check_groups()
        if self.name == "fp8" and self.stated.get(_SEMANTICS) is not None:
            raise UnsupportedModelError(
                f"the checkpoint is quantised by fp8 with scales that codes are divided by ({_SEMANTICS} "
                f"{str(self.stated[_SEMANTICS])[:40]!r}, as GPTQModel writes them), which is not read: those that they "
                "are multiplied by are. Give another checkpoint of the model."
            )
        for layer, algorithm in self._algorithms().items():
            if algorithm not in _ALGORITHMS:
                where = f" in {layer[:60]}" if layer else ""
                raise UnsupportedModelError(
                    f"the checkpoint is quantised by modelopt as {algorithm[:40]!r}{where}, which is not computed with "
                    f"here: {', '.join(_ALGORITHMS)} are. Give another checkpoint of the model."
                )
        if self.stated.get("rotation"):
            raise UnsupportedModelError(
                f"the checkpoint is quantised by {self.name} after its weights were rotated (rotation "
                f"{str(self.stated['rotation'])[:40]!r}), {_NO_TRANSFORMS}. Give another checkpoint of the model."
            )
        if self.name in ("gptq", "awq"):
            bits = self.stated.get("bits", self.stated.get("w_bit"))
            version = self.stated.get("version") if self.name == "awq" else None
            version = version or self.stated.get("checkpoint_format") or {"gptq": "gptq", "awq": "gemm"}[self.name]
            version = str(version).lower()
            if bits != 4 or version not in {"gptq": ("gptq", _SECOND), "awq": ("gemm",)}[self.name]:
                raise UnsupportedModelError(
                    f"the checkpoint is quantised by {self.name} in {str(bits)[:20]} bits as {version[:40]!r}: 4 bits "
                    "are read, of gptq in both of its formats and of awq as gemm. Give another checkpoint of the model."
                )
            for rule, changed in _mapping(self.stated.get("dynamic")).items():
                if not str(rule).startswith("-:") and _mapping(changed).get("bits", 4) != 4:
                    raise UnsupportedModelError(
                        f"the checkpoint is quantised by {self.name} in {str(changed['bits'])[:20]} bits where its "
                        f"rule {str(rule)[:60]!r} says so (dynamic): 4 bits are read. Give another checkpoint of the "
                        "model."
                    )
            for layer, changed in _mapping(self.stated.get(_EXTRA)).items():
                if _mapping(changed).get("bits", 4) not in (4, _UNQUANTISED):
                    raise UnsupportedModelError(
                        f"the checkpoint is quantised by {self.name} in {str(changed['bits'])[:20]} bits in "
                        f"{str(layer)[:60]} ({_EXTRA}): 4 bits are read. Give another checkpoint of the model."
                    )

    def specs(self, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Spec, int]]:
        """Parameters of ``model``, built without values and run in ``dtype``, that a checkpoint of this method has
        quantised, and how many experts each stacks (0: it is one matrix).
        """
        linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for path, parameter in model.named_parameters():
            base = path.removesuffix(".weight")
            module = model.get_submodule(path.rpartition(".")[0])
            stacked = parameter.dim() == 3 and "experts" in path
            if not (stacked or (base in linear and path.endswith(".weight"))) or not self._takes(base, stacked):
                continue
            shape = tuple(parameter.shape)[-2:]
            outputs, inputs = shape[::-1] if has_transposed_experts(module) else shape
            try:
                spec = self._spec(base, outputs, inputs, dtype)
                spec.tensors()
            except CheckpointError:  # groups that do not fit: it was left as it was
                continue
            yield path, spec, len(parameter) if stacked else 0

    def _takes(self, base: str, stacked: bool) -> bool:
        if self.name == "mxfp4":
            return stacked
        left = [one for key in _LEFT for one in _list(self.stated.get(key))]
        left += [f"re:{str(rule)[2:]}" for rule in _mapping(self.stated.get("dynamic")) if str(rule).startswith("-:")]
        extra = _mapping(self.stated.get(_EXTRA)).items()
        left += [str(layer) for layer, changed in extra if _mapping(changed).get("bits") == _UNQUANTISED]
        if any(_matches(base, name) for name in left):
            return False
        is_layer = _LAYERS.search(f".{base}.") is not None
        if base.rpartition(".")[2] in _HEAD and not (is_layer or self._takes_head):
            return False
        if self.name in ("gptq", "awq"):
            return is_layer or self._takes_head
        if self.name == "modelopt":
            return bool(self._algorithm(base))
        targets = [target for group in self._groups() for target in _list(group.get("targets"))]
        return not targets or any(target == "Linear" or _matches(base, target) for target in targets)

    @property
    def _takes_head(self) -> bool:
        """Whether the head is quantised where it is not named among what is left out: only some tools do so unasked."""
        return self.name in ("compressed-tensors", "modelopt") or (
            self.name == "gptq" and self.stated.get("lm_head") is True
        )

    def _algorithms(self) -> dict[str, str]:
        """By layer, or for all of them, how ``modelopt`` has quantised them."""
        if self.name != "modelopt":
            return {}
        one = str(self.stated.get("quant_algo") or "").upper()
        each = _mapping(self.stated.get("quantized_layers")) if one == _MIXED else {}
        named = {str(layer): str(_mapping(how).get("quant_algo") or "").upper() for layer, how in each.items()}
        return named or {"": one}

    def _algorithm(self, base: str) -> str:
        """That of the matrix or the stack of experts ``base``; empty: it was left as it was."""
        known, parent = self._algorithms(), base.rpartition(".")[0]
        experts = (how for layer, how in known.items() if "experts" in parent and layer.startswith(f"{parent}."))
        return known.get("") or known.get(base) or next(experts, "")

    def _spec(self, base: str, outputs: int, inputs: int, dtype: torch.dtype) -> Spec:
        if self.name == "mxfp4":
            return Spec("mxfp4", outputs, inputs)
        if self.name in ("gptq", "awq"):
            group = self.stated.get("group_size", self.stated.get("q_group_size", 128))
            return Spec(self.name, outputs, inputs, _count(group), zeros=True, scale_dtype=torch.float16)
        said = self._group_of(base)
        weights = _mapping(said.get("weights"))
        if _kind(weights) == _FP4 and weights.get("group_size") == MXFP4_GROUP:
            return Spec("mxfp4", outputs, inputs)
        if "NVFP4" in self._algorithm(base) or (self.name != "modelopt" and _kind(weights) == _FP4):
            return Spec("nvfp4", outputs, inputs, block_rows=0, divides=self.name != "modelopt")
        if _kind(weights) == _INT4 and not self._is_in_bytes(said):
            group = _count(weights.get("group_size"))
            zeros = weights.get("symmetric") is False
            return Spec("int4", outputs, inputs, group, zeros=zeros, scale_dtype=dtype)
        block_rows, group = self.block
        channel = weights.get("strategy") in ("channel", "group") or self.name == "fbgemm_fp8"
        if _kind(weights) in _WHOLE:
            group, rows = _count(weights.get("group_size")), 1 if channel else 0
            name = "s8" if self._form(said) in _BYTES else "u8"
            return Spec(name, outputs, inputs, group, rows, scale_dtype=dtype)
        return Spec("fp8", outputs, inputs, group, 1 if channel else block_rows)

    def _groups(self) -> list[Mapping[str, Any]]:
        return [group for group in _mapping(self.stated.get("config_groups")).values() if isinstance(group, Mapping)]

    def _group_of(self, base: str) -> Mapping[str, Any]:
        """What is said of the matrix ``base``: by its name, else of all such modules."""
        groups = [group for group in self._groups() if isinstance(group.get("weights"), Mapping)]
        named = (one for one in groups if any(_matches(base, target) for target in _list(one.get("targets"))))
        found = next(named, None) or next((one for one in groups if "Linear" in _list(one.get("targets"))), None)
        return found or next(iter(groups), {})

    def _form(self, group: Mapping[str, Any]) -> Any:
        """How compressed-tensors calls the layout of what is in a ``group``."""
        return group.get("format") or self.stated.get("format")

    def _weights(self) -> Iterator[Mapping[str, Any]]:
        return (group["weights"] for group in self._groups() if isinstance(group.get("weights"), Mapping))

    def _whole(self, in_bytes: bool) -> list[Mapping[str, Any]]:
        """What is said of the weights in each group of whole numbers that have a byte each, or of those of 4 bits."""
        groups = (group for group in self._groups() if self._is_in_bytes(group) is in_bytes)
        return [weights for group in groups if _kind(weights := _mapping(group.get("weights"))) in _WHOLE]

    def _is_in_bytes(self, group: Mapping[str, Any]) -> bool:
        """Whether each whole number of a ``group`` has a byte."""
        kind = _kind(_mapping(group.get("weights")))
        return kind in _WHOLE and (kind != _INT4 or self._form(group) in _BYTES)

    def _check_groups(self) -> None:
        for group in self._groups():
            form, weights = self._form(group), _mapping(group.get("weights"))
            kind = _kind(weights)
            if kind in _WHOLE and form not in (*_PACKED, *_BYTES):
                raise UnsupportedModelError(
                    f"the checkpoint is quantised by compressed-tensors in {kind[1]} bits of the type int as "
                    f"{str(form)[:40]!r}, which is not read: pack-quantized and {', '.join(_BYTES)} are. Give another "
                    "checkpoint of the model."
                )
            if self._is_in_bytes(group) and weights.get("symmetric") is False:
                raise UnsupportedModelError(
                    "the checkpoint is quantised by compressed-tensors to bytes with zero points (symmetric: false), "
                    "which are read of packed 4 bits only. Give another checkpoint of the model."
                )
        for weights in self._weights():
            kind = _kind(weights)
            odd = kind == _FP4 and weights.get("group_size") not in (NVFP4_GROUP, MXFP4_GROUP)
            if odd or kind not in (*_WHOLE, ("float", 8), _FP4):
                groups = f" in groups of {str(weights.get('group_size'))[:20]}" if odd else ""
                raise UnsupportedModelError(
                    f"the checkpoint is quantised by compressed-tensors in {str(kind[1])[:20]} bits of the type "
                    f"{str(kind[0])[:20]}{groups}, which is not computed with here: int in 4 and 8 bits is, float in "
                    "8, and float in 4 in groups of 16 (NVFP4) and 32 (MXFP4). Give another checkpoint of the model."
                )
        sparse = _mapping(self.stated.get("sparsity_config")).get("format") or "dense"
        if sparse != "dense" or self.stated.get("transform_config"):
            what = f"sparse as {str(sparse)[:40]!r}" if sparse != "dense" else "of transformed weights"
            raise UnsupportedModelError(f"the checkpoint is {what}, {_NO_TRANSFORMS}. Give the original checkpoint.")


def method_of(config: Any) -> Method | None:
    """How the checkpoint of ``config`` was quantised by others; ``None`` where it was not.

    Raises UnsupportedModelError for a method that is not read.
    """
    stated: Any = getattr(config, "quantization_config", None)
    stated = stated.to_dict() if hasattr(stated, "to_dict") else stated
    if not isinstance(stated, Mapping):
        return None
    name = stated.get("quant_method")
    name = str(getattr(name, "value", name) or _unnamed(stated))
    if name == _OURS:
        return None
    if name == "auto-round":
        packing = str(stated.get("packing_format"))
        if packing not in _AUTO_ROUND:
            raise UnsupportedModelError(
                f"the checkpoint is quantised by auto-round and packed as {packing[:40]!r}, which is not read: "
                f"{' and '.join(_AUTO_ROUND)} are. Give another checkpoint of the model."
            )
        name = _AUTO_ROUND[packing]
    if name not in METHODS:
        raise UnsupportedModelError(
            f"the checkpoint is quantised as {name[:40]!r}, which is not read: {', '.join(METHODS)} are, GGUF files, "
            "and what stowage pack writes. Give the original checkpoint, or one of these."
        )
    found = Method(name, stated)
    found.check()
    return found


def _unnamed(stated: Mapping[str, Any]) -> str:
    """The method of a config that does not name it: only some tools leave it out."""
    if "config_groups" in stated:
        return "compressed-tensors"
    if any(str(key).startswith(("load_in_", "bnb_")) for key in stated):
        return "bitsandbytes"
    words = {"desc_act", "sym", "zero_point"}.isdisjoint(stated)
    return "mlx" if words and {"group_size", "bits"} <= stated.keys() else "unknown"


def _kind(weights: Mapping[str, Any]) -> tuple[Any, Any]:
    return weights.get("type"), weights.get("num_bits")


def _block(weights: Mapping[str, Any]) -> Any:
    """Outputs and inputs that share a scale, where compressed-tensors says it of FP8."""
    structure, group = weights.get("block_structure"), _count(weights.get("group_size"))
    if isinstance(structure, str):  # as "128x128"
        return [int(size) if size.isdecimal() else 0 for size in structure.split("x")]
    wide = group and weights.get("type") == "float" and _kind(weights) != _FP4
    return structure or ([1, group] if wide else None)


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else []


def _count(value: Any) -> int:
    """Inputs of a group; 0, all of them, where a number below 1 says so, or nothing does."""
    return max(0, value) if isinstance(value, int) else 0


def _matches(base: str, rule: str) -> bool:
    """Whether a config's rule means the module ``base``: a name, an end or a part of one, a pattern, wildcards."""
    if rule.startswith("re:"):
        try:
            return re.match(rule[3:], base) is not None
        except re.error:
            return False
    return f".{rule}." in f".{base}." or ("*" in rule and fnmatch.fnmatchcase(base, rule))
