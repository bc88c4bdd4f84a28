"""Names of requests: adapters by what their files hold, media where they stand, salts; and the registration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from stowage.core.geometry import Group, Kind
from stowage.plugins import vllm as plugin
from stowage.plugins.vllm.namespace import Namespaces
from stowage.plugins.vllm.requests import Tracked

ENGINE = bytes(range(32))
GROUPS = [Group(0, Kind.FULL, 16, 2, 4096)]


def request(tokens: int = 100, **more: Any) -> Any:
    fields = {"request_id": "r", "cache_salt": None, "lora_request": None, "mm_features": [], "num_preemptions": 0}
    return SimpleNamespace(all_token_ids=list(range(tokens)), **{**fields, **more})


def adapter(directory: Path, weights: bytes, name: str = "adapter") -> Any:
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"r": 8}', encoding="utf-8")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_name=name, lora_path=str(directory))


def test_adapters_are_named_by_the_content_of_their_files(tmp_path: Path) -> None:
    """Not by their name or place: the same files elsewhere share, another training under the same name does not."""
    names = Namespaces(ENGINE)
    first = names.of(request(lora_request=adapter(tmp_path / "one", b"1" * 5000)))
    moved = names.of(request(lora_request=adapter(tmp_path / "two", b"1" * 5000, "renamed")))
    other = names.of(request(lora_request=adapter(tmp_path / "three", b"2" * 5000)))
    assert first == moved
    assert len({first, other, names.of(request()), ENGINE}) == 3 and names.of(request()) == ENGINE


def test_an_adapter_without_files_is_nobody_elses(tmp_path: Path) -> None:
    lora = SimpleNamespace(lora_name="hub/adapter", lora_path=str(tmp_path / "no-such"))
    one, other = Namespaces(ENGINE), Namespaces(ENGINE)
    assert one.of(request(lora_request=lora)) == one.of(request(lora_request=lora))
    assert one.of(request(lora_request=lora)) != other.of(request(lora_request=lora))


def test_salts_and_adapters_are_both_in_the_name(tmp_path: Path) -> None:
    names, lora = Namespaces(ENGINE), adapter(tmp_path / "one", b"1" * 100)
    asked = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_request": lora},
        {"lora_request": lora, "cache_salt": "a"},
    ]
    assert len({names.of(request(**more)) for more in asked}) == len(asked)


def test_after_a_renewal_nothing_has_its_old_name(tmp_path: Path) -> None:
    names, lora = Namespaces(ENGINE), adapter(tmp_path / "one", b"1" * 100)
    asked = [request(), request(cache_salt="a"), request(lora_request=lora)]
    before = {names.of(one) for one in asked}
    names.renew()
    assert not before & {names.of(one) for one in asked}


def keys(*features: tuple[int, str]) -> list[bytes]:
    media = [SimpleNamespace(mm_position=SimpleNamespace(offset=at), identifier=name) for at, name in features]
    tracked = Tracked(request(mm_features=media), ENGINE, GROUPS)
    tracked.extend_keys(100)
    return list(tracked.keys.of(0))


def test_media_are_in_the_names_of_the_chunks_from_where_they_stand() -> None:
    """Their placeholders are the same tokens, whatever they show."""
    cat, dog, none = keys((40, "cat")), keys((40, "dog")), keys()
    assert len(cat) == 3, "chunks of 32 tokens"
    assert cat == keys((40, "cat"))
    assert cat[0] == dog[0] == none[0]
    for later in (1, 2):
        assert len({cat[later], dog[later], none[later]}) == 3


def test_registering_twice_is_registering_once() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("StowageConnector") is plugin.StowageConnector
