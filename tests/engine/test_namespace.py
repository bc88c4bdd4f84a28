"""Every field of the namespace (case F3): whatever a chunk's bytes depend on besides its tokens changes every key; and
what they do not depend on changes none.

Real engines are put together where a real model can show the change. The weights' digest covers a checkpoint's whole
config, so it is held fixed where another field has to make the difference alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.config.memory import Memory
from stowage.core.geometry import Kind
from stowage.core.key import SequenceKeys, namespace
from stowage.engine import assembly
from stowage.errors import CheckpointError, UnsupportedModelError
from stowage.executor import attention
from stowage.models import loading
from stowage.models import namespace as namespace_module
from stowage.models.layout import BlockLayout, LayerTensor, ModelLayout
from stowage.models.loading import Loaded
from stowage.storage.format import envelope, segment
from stowage.testing import tiny_models

TOKENS = list(range(1024))


def parts_of(loaded: Loaded, salt: str = "", **memory: Any) -> assembly.Parts:
    """What an engine is made of, before it has a thread."""
    parts = assembly.assemble(
        loaded, Memory(**{"kv_cache_memory": "8MiB", "host_memory": 0} | memory), salt, lambda: 0.0
    )
    parts.runner.close()
    return parts


def keys_of(loaded: Loaded, salt: str = "", **memory: Any) -> set[bytes]:
    """The keys of one prompt in all groups."""
    parts = parts_of(loaded, salt, **memory)
    keys = SequenceKeys(parts.namespace, parts.layout.groups)
    keys.extend(TOKENS, len(TOKENS))
    found = {key for group in parts.layout.groups for key in keys.of(group.index)}
    assert found
    return found


def in_memory(family: str = "llama", *, same_weights: bool = False, **overrides: Any) -> Loaded:
    loaded = loading.load(tiny_models.build(family, **overrides))
    return dataclasses.replace(loaded, identity="the same") if same_weights else loaded


def assert_apart(*key_sets: set[bytes]) -> None:
    assert len(set().union(*key_sets)) == sum(map(len, key_sets)), "a key in common"


# weights


def test_other_weights() -> None:
    one_bit = tiny_models.build("llama")
    with torch.no_grad():
        one_bit.model.norm.weight.view(torch.int32)[0] ^= 1
    assert_apart(keys_of(in_memory()), keys_of(in_memory(seed=1)), keys_of(loading.load(one_bit)))


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}], ids=["eps", "activation"])
def test_a_config_that_no_parameter_shows(change: dict[str, Any]) -> None:
    """Same names, shapes and values of all parameters, another forward."""
    plain, changed = in_memory(), in_memory(**change)
    for one, other in zip(plain.model.parameters(), changed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert_apart(keys_of(plain), keys_of(changed))


def test_a_buffer_that_no_checkpoint_has() -> None:
    """Rope frequencies are in no state dict, and the cached keys are rotated by them."""
    changed = tiny_models.build("llama")
    changed.model.rotary_emb.inv_freq *= 1.01
    assert_apart(keys_of(in_memory()), keys_of(loading.load(changed)))


def test_a_checkpoints_config(tmp_path: Path) -> None:
    path = tiny_models.write("llama", tmp_path / "one")
    shutil.copytree(path, tmp_path / "two")
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "two" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert_apart(keys_of(loading.load(path)), keys_of(loading.load(tmp_path / "two")))


# data types: the same file, computed in another precision


def test_compute_and_kv_dtype(checkpoints: Callable[..., Path]) -> None:
    loaded = [loading.load(checkpoints("llama"), dtype) for dtype in ("float32", "bfloat16", "float16")]
    assert len({each.identity for each in loaded}) == 1
    assert_apart(*map(keys_of, loaded))


# what lies in a block


@pytest.mark.parametrize("family", ["llama", "gemma3", "nemotron_h"])
def test_block_and_chunk_sizes(family: str) -> None:
    loaded = in_memory(family)
    sizes: list[dict[str, Any]] = [
        {"block_size": 16, "chunk_blocks": 4},
        {"block_size": 32, "chunk_blocks": 4},
        {"block_size": 16, "chunk_blocks": 8},
        {"block_size": 32, "chunk_blocks": 2},
        {"block_size": 16, "chunk_blocks": 4, "group_block_size": {"full": 64}},
    ]
    assert_apart(*(keys_of(loaded, **size) for size in sizes))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma3", {"layer_types": ["full_attention"] * 4}),
        ("gemma3", {"sliding_window": 96}),
        ("llama4", {"attention_chunk_size": 64}),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]}),
    ],
    ids=["kinds", "window", "attention chunk", "order"],
)
def test_group_kinds(family: str, change: dict[str, Any]) -> None:
    assert_apart(keys_of(in_memory(family, same_weights=True)), keys_of(in_memory(family, same_weights=True, **change)))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ],
    ids=["theta", "type", "factor"],
)
def test_rope(rope: dict[str, Any]) -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    one, other = (in_memory(same_weights=True, rope_parameters=each) for each in (plain, rope))
    assert_apart(keys_of(one), keys_of(other))


# what is not in a model


def test_salt_of_the_engine() -> None:
    loaded = in_memory()
    assert_apart(keys_of(loaded), keys_of(loaded, "acme"), keys_of(loaded, "acme2"))


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (assembly, "ENGINE_FORMAT", 99),
        (namespace_module, "PARALLEL", "2"),
        (namespace_module, "ADAPTER", "a digest"),
        (attention, "NAME", "another"),
        (envelope, "VERSION", 99),
        (segment, "VERSION", 99),
        (namespace_module, "own_code", lambda: "of another version"),
        (namespace_module.transformers, "__version__", "99.0"),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else str(value),
)
def test_what_the_code_stands_for(module: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine, format, parallel layout, adapter: of this version there is one each, so another version is played."""
    loaded = in_memory()
    before = keys_of(loaded)
    monkeypatch.setattr(module, name, value)
    assert_apart(before, keys_of(loaded))


def test_code_that_computes_is_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a defect made of a checkpoint is not read once it is mended; a command's new words empty no cache."""
    package, there = Path(namespace_module.__file__).parents[1], tmp_path / "stowage"
    shutil.copytree(package, there, ignore=shutil.ignore_patterns("*.so", "*.txt", "__pycache__"))
    monkeypatch.setattr(namespace_module, "__file__", str(there / "models" / "namespace.py"))
    name = namespace_module.own_code.__wrapped__
    found = [namespace_module.own_code(), name()]
    assert found[0] == found[1], "a copy of the same code elsewhere"
    for file in ("__init__.py", "models/gguf/config.py", "weights/checkpoint.py", "executor/runner.py"):
        with (there / file).open("a") as text:
            text.write("# mended\n")
        found.append(name())
    assert len(set(found)) == len(found) - 1
    (there / "cli" / "app.py").write_text("")
    assert name() == found[-1]


def test_an_adapter_that_is_not_merged_is_refused(tmp_path: Path) -> None:
    """It could be switched, or put on top of other weights, under keys that say nothing of it."""
    path = tiny_models.write("llama", tmp_path / "model")
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(CheckpointError, match="adapter_config"):
        loading.load(path)
    model = tiny_models.build("llama")
    model.peft_config = {"default": object()}
    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        loading.load(model)


# each field alone: what no real model of these families can change without changing another field too


def fields_of(loaded: Loaded, layout: ModelLayout, salt: str = "") -> Mapping[str, Any]:
    return namespace_module.namespace_fields(loaded, layout, salt, "embedded/1", "paged")


def with_block(layout: ModelLayout, **change: Any) -> ModelLayout:
    return dataclasses.replace(layout, blocks=(dataclasses.replace(layout.blocks[0], **change), *layout.blocks[1:]))


def with_group(layout: ModelLayout, **change: Any) -> ModelLayout:
    return with_block(layout, group=dataclasses.replace(layout.blocks[0].group, **change))


def with_layer(layout: ModelLayout, **change: Any) -> ModelLayout:
    block: BlockLayout = layout.blocks[0]
    layer = dataclasses.replace(block.layers[0], **change)
    offsets = {layer.index: block.offsets[block.layers[0].index]} | dict(block.offsets)
    return with_block(layout, layers=(layer, *block.layers[1:]), offsets=offsets)


def with_tensor(layout: ModelLayout, change: Callable[[LayerTensor], LayerTensor]) -> ModelLayout:
    key, value = layout.blocks[0].layers[0].tensors
    return with_layer(layout, tensors=(change(key), value))


LAYOUTS: dict[str, Callable[[ModelLayout], ModelLayout]] = {
    "KV dtype of the same size": lambda a: with_tensor(a, lambda t: LayerTensor(t.shape, torch.int32)),
    "heads and head size": lambda a: with_tensor(a, lambda t: LayerTensor((t.shape[0] * 2, t.shape[1] // 2), t.dtype)),
    "latent or expanded": lambda a: with_layer(a, latent=True),
    "number of a layer": lambda a: with_layer(a, index=77),
    "offsets in the block": lambda a: with_block(a, offsets={i: o[::-1] for i, o in a.blocks[0].offsets.items()}),
    "order of the groups": lambda a: dataclasses.replace(a, blocks=a.blocks[::-1]),
    "kind": lambda a: with_group(a, kind=Kind.CHUNKED),
    "window": lambda a: with_group(a, window=73),
    "block_tokens": lambda a: with_group(a, block_tokens=8),
    "blocks_per_chunk": lambda a: with_group(a, blocks_per_chunk=2),
    "bytes_per_block": lambda a: with_group(a, bytes_per_block=1 << 20),
}


@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_each_part_of_the_layout_alone(change: Callable[[ModelLayout], ModelLayout]) -> None:
    loaded = in_memory("gemma3")
    layout = parts_of(loaded).layout
    changed = change(layout)
    assert all(math.prod(t.shape) for block in changed.blocks for layer in block.layers for t in layer.tensors)
    assert namespace(fields_of(loaded, layout)) != namespace(fields_of(loaded, changed))


ALONE: dict[str, Callable[[Loaded], Loaded]] = {
    "weights": lambda a: dataclasses.replace(a, identity="another"),
    "family": lambda a: _with_config(a, model_type="qwen3"),
    "compute_dtype": lambda a: dataclasses.replace(a, model=_Stub(a.model.config, torch.float16)),
    "rope": lambda a: _with_config(a, rope_parameters={"full_attention": {"rope_theta": 5.0}}),
}
BY_OTHER_TESTS = {"format", "engine", "code", "attention", "groups", "parallel", "adapter", "salt"}


@dataclasses.dataclass
class _Stub:
    """A model as the namespace sees it."""

    config: Any
    dtype: torch.dtype


def _with_config(loaded: Loaded, **change: Any) -> Loaded:
    config = tiny_models.config("gemma3")
    for name, value in change.items():
        object.__setattr__(config, name, value)
    return dataclasses.replace(loaded, model=_Stub(config, loaded.model.dtype))


@pytest.mark.parametrize("name", ALONE)
def test_each_field_of_the_model_alone(name: str) -> None:
    loaded = in_memory("gemma3")
    layout = parts_of(loaded).layout
    before, after = fields_of(_with_config(loaded), layout), fields_of(ALONE[name](loaded), layout)
    assert {field for field in before if before[field] != after[field]} == {name}
    assert namespace(before) != namespace(after)


def test_no_field_is_without_a_test() -> None:
    loaded = in_memory("llama")
    assert set(fields_of(loaded, parts_of(loaded).layout)) == set(ALONE) | BY_OTHER_TESTS


# what must not change a key


def test_what_bytes_do_not_depend_on(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    """Tokenizer, place, name, budgets: another process with other settings finds the same chunks."""
    path = checkpoints("llama")
    expected = keys_of(loading.load(path))
    shutil.copytree(path, tmp_path / "copy")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / "copy" / name).unlink(missing_ok=True)
    copy = loading.load(tmp_path / "copy")
    assert copy.tokenizer is None
    assert keys_of(copy) == expected
    assert keys_of(loading.load(path, tokenizer=tiny_models.tokenizer(512))) == expected
    disk = f"{tmp_path / 'cache'}:32MiB"
    parts = parts_of(
        copy, kv_cache_memory="16MiB", host_memory="16MiB", disk=disk, max_num_batched_tokens=128, max_num_seqs=3
    )
    assert parts.store is not None
    parts.store.close()
    assert parts.namespace == parts_of(loading.load(path)).namespace


def test_one_model_in_memory_keeps_its_keys() -> None:
    """Also while and after an engine uses it, which changes how it computes attention; and wherever it came from."""
    model = tiny_models.build("llama")
    expected = keys_of(loading.load(model))
    assert keys_of(loading.load(model)) == expected
    attention.install(model)
    assert keys_of(loading.load(model)) == expected
    attention.uninstall(model)
    other = tiny_models.build("llama")
    other.config.name_or_path = "elsewhere"
    assert other.config.to_dict()["_name_or_path"] == "elsewhere"
    assert keys_of(loading.load(other)) == expected
