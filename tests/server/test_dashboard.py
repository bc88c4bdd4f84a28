"""The state behind the dashboard: its numbers are those of /metrics, each client sees its own requests, nothing of what
was asked or answered is in it, and it is bounded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from stowage.server import dashboard_page
from stowage.server.middleware import STATE
from tests.engine.conftest import random_prompt
from tests.nursery import wait_until
from tests.server import wire
from tests.server.process import Server

ALICE, BOB = "alice-" + "a" * 20, "bob-" + "b" * 20
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PLACES = ("device", "host", "disk")


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """With every tier, a device that is soon full, and nobody's keys."""
    cache = tmp_path_factory.mktemp("cache") / "disk"
    return start(
        "--host-memory", "2MiB", "--disk", f"{cache}:64MiB", "--kv-cache-memory", "512KiB", "--log-level", "info"
    )


@pytest.fixture(scope="module")
def guarded(start: Callable[..., Server]) -> Server:
    return start("--host-memory", "16MiB", STOWAGE_API_KEYS=f"{ALICE},{BOB}")


def state(server: Server, key: str = "", **query: object) -> dict:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(server.url + STATE, params=query, headers=headers, timeout=60).raise_for_status().json()


def ask(
    server: Server, prompt: object, key: str = "", tokens: int = 2, route: str = TEXT, **extra: object
) -> httpx.Response:
    asked = {"messages": prompt} if route == CHAT else {"prompt": prompt}
    body = {"model": "tiny", "max_tokens": tokens, "ignore_eos": True, **asked, **extra}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(server.url + route, json=body, headers=headers, timeout=60)


def ended(server: Server, identity: str, key: str = "") -> dict:
    """A request that has ended; its client may know that before the journal does."""
    found: list[dict] = []

    def there() -> bool:
        found[:] = [one for one in state(server, key)["requests"]["ended"] if one["id"] == identity]
        return bool(found)

    wait_until(there, "the request has ended")
    return found[0]


# the page


def test_the_page_runs_what_it_was_made_with_and_nothing_else(server: Server) -> None:
    """Its policy allows this script and this style by their digests, this server, and no other place."""
    answer = httpx.get(server.url + "/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    digests = []
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert len(content) > 1000
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        digests.append(f"{tag}-src 'sha256-{digest}'")
    policy = answer.headers["content-security-policy"].split("; ")
    fixed = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    assert sorted(policy) == sorted([*fixed, *digests, "frame-ancestors 'none'"])
    assert answer.headers["x-frame-options"] == "DENY" and answer.headers["referrer-policy"] == "no-referrer"
    assert set(re.findall(r"https?://[^\s'\"]+", answer.text)) == {"http://www.w3.org/2000/svg"}


FORBIDDEN = (
    "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( setAttribute('style import( srcdoc onclick="
)


@pytest.mark.parametrize("name", dashboard_page.SCRIPTS)
def test_no_script_makes_markup_of_data(name: str) -> None:
    text = dashboard_page._part(name)
    assert [word for word in FORBIDDEN.split() if word in text] == []


def test_every_part_is_in_the_package() -> None:
    """Whoever installs a wheel has the page."""
    root = Path(__file__).parents[2]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "stowage.server"
    ]
    source = root / "src" / "stowage" / "server"
    parts = {path for pattern in listed for path in source.glob(pattern)}
    assert parts == {path for path in source.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert {path.name for path in parts} == {*dashboard_page.SCRIPTS, "page.html", "style.css"}


# numbers


@pytest.mark.slow
def test_every_number_is_that_of_the_metrics(server: Server) -> None:
    """After hits on the device, the host and the disk, with several choices, and streams."""
    prompts = [random_prompt(300, seed=n) for n in range(12)]

    def every_place() -> bool:  # what is loaded, and what computed, depends on which of them is quicker here
        assert all(ask(server, prompt).status_code == 200 for prompt in [*prompts, prompts[-1], prompts[-4]])
        found = server.metrics()
        return all(found.get(("stowage_cached_prompt_tokens_total", (("tier", place),))) for place in PLACES)

    wait_until(every_place, "prefixes came from every place")
    assert ask(server, prompts[0], n=3, stream=True).status_code == 200
    assert ask(server, [{"role": "user", "content": "hello"}], route=CHAT).status_code == 200
    assert ask(server, "x" * 100_000).status_code == 400
    wait_until(lambda: server.idle() and not state(server)["transfers"]["transfers_under_way"], "all is done")
    metrics, seen = server.metrics(), state(server)
    assert seen["server"]["model"] == "tiny" and seen["server"]["choices_open"] == 0

    def metric(name: str, **labels: str) -> float:
        return metrics["stowage_" + name, tuple(sorted(labels.items()))]

    def total(name: str, **labels: str) -> float:
        wanted = set(labels.items())
        return sum(v for (n, at), v in metrics.items() if n == "stowage_" + name and wanted <= set(at))

    totals = seen["totals"]
    for name in ("tokens_reused", "tokens_computed", "prompt_tokens_computed", "preemptions", "loads_refused"):
        assert totals[name] == metric(name + "_total"), name
    saved = metric("recompute_saved_seconds_total") - metric("waited_for_tiers_seconds_total")
    assert totals["seconds_saved"] == pytest.approx(max(0, saved))
    everything = metric("tokens_reused_total") + metric("prompt_tokens_computed_total")
    assert 0 < totals["hit_rate"] == pytest.approx(metric("tokens_reused_total") / everything)
    assert totals["corrupt_chunks"] == metric("tier_corrupt_chunks_total", tier="disk") == 0
    routes = [total("http_requests_total", route=route) for route in (TEXT, CHAT)]
    assert totals["requests"] == sum(routes) and min(routes) > 0
    assert totals["answer_tokens"] == total("answer_tokens_total")
    assert totals["first_tokens"] == total("time_to_first_token_seconds_count")

    (group,) = seen["memory"]["device"]["groups"]
    for name in ("blocks", "used", "cached"):
        where = "device_blocks" + ("" if name == "blocks" else f"_{name}")
        assert group[name] == metric(where, group="0", kind="full")
    assert group["bytes"] == metric("device_bytes", group="0", kind="full")
    assert (group["layers"], group["block_tokens"]) == (4, 16) and seen["memory"]["device"]["weights_bytes"] > 0
    host = seen["memory"]["host"]
    (slab,) = host["slabs"]
    assert host["bytes"] == metric("host_bytes") and host["chunks_pinned"] == metric("host_chunks_pinned")
    assert slab["bytes"] == metric("host_slab_bytes", slab="0") and slab["kinds"] == ["full"]
    assert 0 < slab["bytes_used"] == metric("host_slab_used_bytes", slab="0")
    (disk,) = seen["memory"]["tiers"]
    assert (disk["name"], disk["shared"], disk["breaker"]) == ("disk", False, "closed")
    for name, where in (("bytes_used", "used_bytes"), ("bytes_limit", "limit_bytes"), ("chunks", "chunks")):
        assert 0 < disk[name] == metric("tier_" + where, tier="disk")
    for name, where in (("read_bytes", "read_bytes_total"), ("write_bytes", "written_bytes_total")):
        assert 0 < disk[name] == metric("tier_" + where, tier="disk")
    assert seen["transfers"]["promoted_bytes"] == metric("promoted_bytes_total") > 0
    assert seen["transfers"]["spilled_bytes"] == metric("spilled_bytes_total") > 0

    by_place: dict[str, int] = {}
    for one in seen["requests"]["ended"]:
        for place, tokens in one["reused_tokens"].items():
            by_place[place] = by_place.get(place, 0) + tokens
    assert by_place == {place: total("cached_prompt_tokens_total", tier=place) for place in PLACES}


def test_one_request(server: Server) -> None:
    """What is told about it is what its client was told."""
    prompt = random_prompt(250, seed=77)
    first, again = ask(server, prompt, tokens=3), ask(server, prompt, tokens=3, n=2)
    cold, warm = (ended(server, response.headers["x-request-id"]) for response in (first, again))
    assert cold["prompt_tokens"] == cold["computed_tokens"] == 250 and sum(cold["reused_tokens"].values()) == 0
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert sum(warm["reused_tokens"].values()) == cached > 0 and warm["computed_tokens"] == 250 - cached
    assert (cold["answer_tokens"], warm["answer_tokens"], warm["choices"]) == (3, 6, 2)
    for one in (cold, warm):
        assert (one["state"], one["status"], one["reason"], one["kind"]) == ("done", 200, "length", "completion")
        times = list(one["times"].values())
        assert None not in times and times == sorted(times) and times[0] >= 0, one["times"]
    assert warm["arrived_s"] > cold["arrived_s"] + cold["times"]["submitted_s"]


def test_a_request_that_is_open_and_one_whose_client_leaves(guarded: Server) -> None:
    with wire.connected(guarded) as client:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        client.sendall(wire.request(TEXT, body, f"authorization: Bearer {ALICE}"))
        head = wire.until(client, b"data: ").lower()
        identity = re.search(rb"x-request-id: (\S+)", head)[1].decode()  # type: ignore[index]
        seen = state(guarded, ALICE)
        (found,) = [one for one in seen["requests"]["open"] if one["id"] == identity]
        assert found["state"] == "answering" and found["stream"] and found["answer_tokens"] > 0
        assert found["times"]["ended_s"] is None and found["times"]["first_token_s"] is not None
        assert seen["server"]["choices_open"] == 1
    gone = ended(guarded, identity, ALICE)
    assert (gone["state"], gone["reason"]) == ("left", "") and gone["times"]["ended_s"] > 0
    assert 0 < found["answer_tokens"] <= gone["answer_tokens"] < 1500
    assert not state(guarded, ALICE)["requests"]["open"]


def test_a_request_that_fails(start: Callable[..., Server]) -> None:
    """It runs out of time: as an answer with a status, and in the middle of a stream, which has its status."""
    slow = start("--request-timeout-s", "0.2")
    for stream in (False, True):
        response = ask(slow, "x", tokens=3000, stream=stream)
        found = ended(slow, response.headers["x-request-id"])
        assert (found["state"], found["status"]) == ("failed", 200 if stream else 504)


def test_only_what_is_new(server: Server) -> None:
    """The time of an answer brings, in the next one, what has ended since; a wrong time is told."""
    first = ask(server, "one")
    ended(server, first.headers["x-request-id"])
    then = state(server)["server"]["now_s"]
    second = ask(server, "two")
    ended(server, second.headers["x-request-id"])
    news = state(server, after=then)
    assert [one["id"] for one in news["requests"]["ended"]] == [second.headers["x-request-id"]]
    assert all(sample[0] >= then - 0.001 for sample in news["history"]["samples"])
    every = state(server)
    assert [one["id"] for one in every["requests"]["ended"][:2]] == [
        response.headers["x-request-id"] for response in (second, first)
    ]
    assert every["history"]["samples"] and len(every["history"]["samples"][0]) == len(every["history"]["names"])
    assert not state(server, after=1e9)["requests"]["ended"]
    for wrong in ("now", "nan", "inf", ""):
        response = httpx.get(server.url + STATE, params={"after": wrong})
        assert response.status_code == 400 and response.json()["error"]["param"] == "after"


# secrets


def test_nothing_of_what_is_asked_or_answered(guarded: Server) -> None:
    """No prompt, no answer, no token ids, no salt, no key, no path."""
    words = "somebody's private words"
    answers = [
        ask(guarded, words, ALICE, cache_salt="hidden-salt").json()["choices"][0]["text"],
        ask(guarded, [{"role": "user", "content": words}], ALICE, 8, CHAT).json()["choices"][0]["message"]["content"],
    ]
    ask(guarded, [201, 202, 203, 204], ALICE)
    text = json.dumps(state(guarded, ALICE))
    assert len(state(guarded, ALICE)["requests"]["ended"]) >= 2
    for secret in (words, "private", "hidden-salt", ALICE, "alice", "201, 202", str(guarded.err.parent), *answers):
        assert json.dumps(secret)[1:-1] not in text, secret
    allowed = {"id", "kind", "stream", "choices", "state", "status", "reason", "prompt_tokens", "reused_tokens"}
    allowed |= {"computed_tokens", "answer_tokens", "preemptions", "arrived_s", "times"}
    assert {name for one in state(guarded, ALICE)["requests"]["ended"] for name in one} == allowed


def test_a_client_sees_its_own_requests(guarded: Server) -> None:
    mine = ended(guarded, ask(guarded, "x", ALICE).headers["x-request-id"], ALICE)
    theirs = ended(guarded, ask(guarded, "x", BOB).headers["x-request-id"], BOB)
    for key, own, other in ((ALICE, mine, theirs), (BOB, theirs, mine)):
        text = json.dumps(state(guarded, key)["requests"])
        assert own["id"] in text and other["id"] not in text
    with wire.connected(guarded) as client:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        client.sendall(wire.request(TEXT, body, f"authorization: Bearer {ALICE}"))
        wire.until(client, b"data: ")
        assert len(state(guarded, ALICE)["requests"]["open"]) == 1
        seen = state(guarded, BOB)
        assert seen["requests"]["open"] == [] and seen["server"]["choices_open"] == 1


def basic(key: str, user: str = "me") -> str:
    return "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()


def test_a_browser_may_send_the_key_as_a_password(guarded: Server) -> None:
    """To look at the dashboard, and for nothing else."""
    with httpx.Client(base_url=guarded.url) as client:
        for user in ("me", "", "ü"):
            for path in ("/", STATE):
                for method in ("GET", "HEAD"):
                    given = {"authorization": basic(BOB, user)}
                    assert client.request(method, path, headers=given).status_code == 200
        for path in ("/metrics", "/version", "/v1/models", "/nothing", STATE + "/"):
            assert client.get(path, headers={"authorization": basic(BOB)}).status_code == 401
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        for path in (TEXT, CHAT, "/", STATE):
            assert client.post(path, json=body, headers={"authorization": basic(BOB)}).status_code == 401
        wrong = [basic(BOB[:-1]), basic(""), basic(f"{BOB} "), "Basic", "Basic !!!", "Basic " + BOB, basic(BOB)[:-3]]
        wrong += ["Basic " + base64.b64encode(BOB.encode()).decode(), f"Digest {BOB}", "basic"]
        for given_wrong in wrong:
            for path, challenge in (("/", "Basic "), (STATE, "Bearer")):
                refused = client.get(path, headers={"authorization": given_wrong})
                assert refused.status_code == 401, given_wrong
                assert refused.headers["www-authenticate"].startswith(challenge) and BOB not in refused.text


def test_no_other_page_may_read_it(guarded: Server) -> None:
    for path in ("/", STATE):
        headers = {"authorization": basic(BOB), "origin": "https://evil.example"}
        answer = httpx.get(guarded.url + path, headers=headers)
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store" and answer.headers["x-content-type-options"] == "nosniff"
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_polling_fills_no_log(server: Server) -> None:
    asked, refused = "route=/v1/stowage/state", "route=/v1/stowage/state status=400"
    before = server.err.read_text()
    state(server)
    httpx.get(server.url + STATE, params={"after": "x"})
    wait_until(lambda: server.err.read_text().count(refused) > before.count(refused), "what fails is told")
    assert server.err.read_text().count(asked) == before.count(asked) + 1
