"""Names of requests: adapters by what their files hold, media where they stand, salts; and the registration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from stowage.core.geometry import Group, Kind
from stowage.plugins import vllm as plugin
from stowage.plugins.vllm.adapter import Drafts, hashes_media
from stowage.plugins.vllm.namespace import Namespaces
from stowage.plugins.vllm.requests import Tracked

ENGINE = bytes(range(32))
GROUPS = [Group(0, Kind.FULL, 16, 2, 4096)]


def request(tokens: int = 100, **more: Any) -> Any:
    fields = {"request_id": "r", "cache_salt": None, "lora_request": None, "mm_features": [], "num_preemptions": 0}
    text = list(range(tokens))
    return SimpleNamespace(all_token_ids=text, prompt_token_ids=text, **{**fields, **more})


def adapter(directory: Path, weights: bytes, number: int = 1, *, load_inplace: bool = False) -> Any:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}', encoding="utf-8")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return LoRARequest("adapter", number, str(directory), load_inplace=load_inplace)


def test_adapters_are_named_by_the_content_of_their_files(tmp_path: Path) -> None:
    """Not by their name or place: the same files elsewhere share, another training under the same name does not."""
    names = Namespaces(ENGINE)
    first = names.of(request(lora_request=adapter(tmp_path / "one", b"1" * 5000)))
    moved = names.of(request(lora_request=adapter(tmp_path / "two", b"1" * 5000, 2)))
    other = names.of(request(lora_request=adapter(tmp_path / "three", b"2" * 5000, 3)))
    assert first == moved
    assert len({first, other, names.of(request()), ENGINE}) == 3 and names.of(request()) == ENGINE


def test_an_adapter_without_files_is_nobody_elses(tmp_path: Path) -> None:
    lora = LoRARequest("hub/adapter", 1, str(tmp_path / "no-such"))
    one, other = Namespaces(ENGINE), Namespaces(ENGINE)
    assert one.of(request(lora_request=lora)) == one.of(request(lora_request=lora))
    assert one.of(request(lora_request=lora)) != other.of(request(lora_request=lora))


def test_an_adapter_whose_tensors_are_elsewhere_is_nobody_elses(tmp_path: Path) -> None:
    """Its directory says how it was trained, and not what came of it."""
    lora = adapter(tmp_path / "one", b"")
    (tmp_path / "one" / "adapter_model.safetensors").unlink()
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


def test_an_adapter_that_changed_on_disk_is_still_unknown_after_a_renewal(tmp_path: Path) -> None:
    """Workers keep what they read of it before."""
    names = Namespaces(ENGINE)
    names.of(request(lora_request=adapter(tmp_path / "one", b"1" * 5000)))
    changed = adapter(tmp_path / "one", b"2" * 5000)
    names.renew()
    with pytest.raises(ValueError, match="have changed since the adapter was loaded"):
        names.of(request(lora_request=changed))


def keys(names: Namespaces, *features: tuple[int, str]) -> list[bytes]:
    media = [SimpleNamespace(mm_position=SimpleNamespace(offset=at), identifier=name) for at, name in features]
    tracked = Tracked(request(mm_features=media), names, GROUPS)
    tracked.extend_keys(100)
    return list(tracked.keys.of(0))


@pytest.mark.parametrize("names", [("cat", "dog"), ("c" * 64, "d" * 64), ("lora:" + "c" * 128, "lora:" + "d" * 128)])
def test_media_are_in_the_names_of_the_chunks_from_where_they_stand(names: tuple[str, str]) -> None:
    """Their placeholders are the same tokens, whatever they show."""
    engine = Namespaces(ENGINE)
    cat, dog, none = keys(engine, (40, names[0])), keys(engine, (40, names[1])), keys(engine)
    assert len(cat) == 3, "chunks of 32 tokens"
    assert cat == keys(engine, (40, names[0]))
    assert cat[0] == dog[0] == none[0]
    for later in (1, 2):
        assert len({cat[later], dog[later], none[later]}) == 3


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_next_turn_of_a_streaming_session(lookahead: int) -> None:
    """vLLM gives up the last token that it sampled, for the turn's text and pictures: those are in the names."""
    cat = SimpleNamespace(mm_position=SimpleNamespace(offset=110), identifier="c" * 64)
    drafts = Drafts("eagle", lookahead)

    def all_keys(one: Any, known: int = 0) -> list[bytes]:
        tracked = Tracked(one, Namespaces(ENGINE), GROUPS, drafts)
        if known:
            tracked.extend_keys(known)
            one.all_token_ids[known:] = one.prompt_token_ids[known:] = range(1000, 1100)
            one.mm_features.append(cat)
        tracked.extend_keys(160)
        return list(tracked.keys.of(0))

    whole = request(100)
    whole.all_token_ids = whole.prompt_token_ids = [*range(100), *range(1000, 1100)]
    whole.mm_features = [cat]
    session = request(101, mm_features=[])
    session.prompt_token_ids = list(session.all_token_ids[:80])
    assert len(all_keys(whole)) == 5
    assert all_keys(session, 100) == all_keys(whole)


@pytest.mark.parametrize(
    ("name", "hashes_media", "shared"),
    [
        ("c" * 64, True, True),
        ("lora:" + "c" * 64, True, True),
        ("renderer0-mm-0-image-0", True, False),
        ("holiday.jpg", True, False),
        ("c" * 64, False, False),
    ],
)
def test_media_that_are_not_named_by_their_content_are_one_engines_own(
    name: str, hashes_media: bool, shared: bool
) -> None:
    """Another one counts from 0 too, and its clients call other pictures so."""
    engines = [Namespaces(ENGINE, hashes_media=hashes_media) for _ in range(2)]
    one, other = (keys(engine, (40, name)) for engine in engines)
    assert one[0] == other[0] and (one[1] == other[1]) is shared


@pytest.mark.parametrize(
    ("prefix_caching", "cache_gb", "hashes"),
    [(True, 0, True), (False, 4, True), (False, 0, False), (False, None, True)],
)
def test_where_vllm_keeps_no_media_it_counts_them(prefix_caching: bool, cache_gb: int | None, hashes: bool) -> None:
    media = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert hashes_media(config) is hashes


def test_an_adapter_that_is_trained_on_where_it_lies(tmp_path: Path) -> None:
    """Loaded again, under another number or in place, it has its new name. Else nobody knows what is computed with."""
    names = Namespaces(ENGINE)
    first = names.of(request(lora_request=adapter(tmp_path / "one", b"1" * 5000)))
    changed = adapter(tmp_path / "one", b"2" * 5000)
    with pytest.raises(ValueError, match=r"have changed since the adapter was loaded.*a new path"):
        names.of(request(lora_request=changed))
    fresh = Namespaces(ENGINE).of(request(lora_request=changed))
    again = adapter(tmp_path / "one", b"2" * 5000, 2)
    in_place = adapter(tmp_path / "one", b"2" * 5000, load_inplace=True)
    assert names.of(request(lora_request=again)) == fresh != first
    assert names.of(request(lora_request=in_place)) == fresh


def test_files_that_are_copied_over_themselves_have_not_changed(tmp_path: Path) -> None:
    names = Namespaces(ENGINE)
    first = names.of(request(lora_request=adapter(tmp_path / "one", b"1" * 5000)))
    assert names.of(request(lora_request=adapter(tmp_path / "one", b"1" * 5000))) == first


def test_registering_twice_is_registering_once() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("StowageConnector") is plugin.StowageConnector
