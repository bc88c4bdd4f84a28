"""API keys: who may ask, and that clients with different keys share no prefix; and who may ask where there are none."""

from __future__ import annotations

import base64
import hmac
import os
from pathlib import Path

import httpx
import openai
import pytest

from stowage.errors import ConfigError
from stowage.server.auth import ApiKeys, Tenant, load
from tests.engine.conftest import random_prompt
from tests.server.process import Server

ALICE, BOB, CAROL = "alice-" + "a" * 20, "bob-" + "b" * 20, "carol-" + "c" * 20
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/nothing"),
    ("GET", "/"),
    ("GET", "/v1/stowage/state"),
    ("POST", "/v1/stowage/state"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/%68ealth2"),
]


@pytest.fixture(scope="module")
def server(start, tmp_path_factory) -> Server:
    """Two keys in a file, one in the environment."""
    path = tmp_path_factory.mktemp("keys") / "api-keys"
    path.write_text(f"# who: alice\n{ALICE}\n\n  {BOB}  \n")
    path.chmod(0o600)
    return start("--api-key-file", str(path), "--host-memory", "16MiB", "--log-level", "info", STOWAGE_API_KEYS=CAROL)


def ask(server: Server, key: str, prompt: object = "x", **extra: object) -> openai.types.Completion:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=extra)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_but_health_wants_a_key(server: Server, method: str, path: str) -> None:
    wrong = [None, "", "Bearer", f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}", f"Basic {ALICE}", ALICE]
    wrong += [f"Bearer {ALICE}, Bearer {BOB}", "Bearer None", f"Bearer {ALICE.upper()}", "Bearer # who: alice"]
    url = server.url + path  # a client's base would swallow the first of two slashes
    with httpx.Client() as client:
        for given in wrong:
            headers = {"authorization": given} if given is not None else {}
            response = client.request(method, url, headers=headers)
            assert response.status_code == 401, given
            error = response.json()["error"]
            assert error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"].startswith("Basic " if path == "/" else "Bearer")
            assert ALICE not in response.text
        assert client.request(method, url, headers={"authorization": f"bearer {ALICE}"}).status_code != 401


@pytest.mark.parametrize("given", [(ALICE, BOB), (BOB, ALICE), (ALICE, ALICE), ("wrong-wrong-wrong", ALICE)])
def test_two_keys_are_none(server: Server, given: tuple[str, str]) -> None:
    """The last one used to win, whatever a proxy in between had looked at."""
    headers = [("authorization", f"Bearer {key}") for key in given]
    response = httpx.get(server.url + "/v1/models", headers=headers)
    assert response.status_code == 400 and "more than once" in response.json()["error"]["message"]


def test_health_is_open_and_tells_nothing(server: Server) -> None:
    for key in ("", "wrong", ALICE):
        response = httpx.get(server.url + "/health", headers={"authorization": f"Bearer {key}".strip()})
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_every_key_is_known(server: Server) -> None:
    for key in (ALICE, BOB, CAROL):
        assert ask(server, key).choices
    with pytest.raises(openai.AuthenticationError):
        ask(server, "wrong")


def test_clients_share_no_prefix(server: Server) -> None:
    """Each finds what it had computed itself, and nothing else; a `cache_salt` divides what one key has."""
    prompt = random_prompt(200, seed=3)

    def cached(key: str, **extra: str) -> int:
        return ask(server, key, prompt, **extra).usage.prompt_tokens_details.cached_tokens

    assert cached(ALICE) == 0 and cached(ALICE) == 192
    assert cached(BOB) == 0 and cached(BOB) == 192
    assert cached(CAROL) == 0
    salts = ["", ALICE, BOB, "s"]
    assert [cached(ALICE, cache_salt=salt) for salt in salts] == [192, 0, 0, 0]
    assert [cached(BOB, cache_salt=salt) for salt in salts] == [192, 0, 0, 0]
    assert [cached(ALICE, cache_salt=salt) for salt in salts] == [192] * 4


def test_the_log_holds_no_secret(server: Server) -> None:
    ask(server, ALICE, "a prompt that nobody else reads", cache_salt="a salt that nobody knows")
    httpx.get(server.url + "/v1/models/secret-path", headers={"authorization": "Bearer wrong-key-of-somebody"})
    log = server.err.read_text()
    assert "route=/v1/completions status=200" in log and "route=/v1/models/{model} status=401" in log
    for secret in (ALICE, BOB, CAROL, "alice", "nobody", "wrong-key", "secret-path"):
        assert secret not in log
    metrics = httpx.get(server.url + "/metrics", headers={"authorization": f"Bearer {BOB}"}).text
    assert "alice" not in metrics and "secret-path" not in metrics


def test_salts() -> None:
    """Of different clients, and of one client's different salts, all different; and the same after a restart."""
    keys = [ApiKeys([ALICE, BOB]) for _ in range(2)]
    salts = ["", "a", "b", ALICE, BOB, "a\0b"]
    made = {
        (key, salt): keys[0].tenant(f"Bearer {key}".encode()).salt(salt)  # type: ignore[union-attr]
        for key in (ALICE, BOB)
        for salt in salts
    }
    made |= {("nobody", salt): Tenant().salt(salt) for salt in salts[1:]}
    assert len(set(made.values())) == len(made) and all(len(salt) == 32 for salt in made.values())
    assert keys[1].tenant(f"Bearer {ALICE}".encode()).salt("a") == made[ALICE, "a"]  # type: ignore[union-attr]
    assert Tenant().salt("") == b"", "without keys and salts a server shares with `stowage run`"
    assert ALICE not in repr(keys[0].tenant(f"Bearer {ALICE}".encode())) + repr(keys[0].__dict__)


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, by digests of one length, with the function that is made for it, whichever is the right one."""
    compared = []

    def seen(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", seen)
    keys = ApiKeys([ALICE, BOB, CAROL])
    for given in (ALICE, BOB, CAROL, "wrong", "", "x" * 10_000):
        compared.clear()
        keys.tenant(f"Bearer {given}".encode())
        assert len(compared) == 3 and {len(part) for pair in compared for part in pair} == {32}
        compared.clear()
        keys.tenant(b"Basic " + base64.b64encode(f"me:{given}".encode()), basic=True)
        assert len(compared) == 3 and {len(part) for pair in compared for part in pair} == {32}


# where the keys come from


def written(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("", 0o600, "no key"),
        ("# only a comment\n\n", 0o600, "no key"),
        (ALICE, 0o640, "chmod 600"),
        (ALICE, 0o604, "chmod 600"),
        (ALICE, 0o620, "chmod 600"),
        (f"{ALICE}\nshort-secret", 0o600, "12 characters"),
        (f"{ALICE}\ntwo words in one line of it", 0o600, "key 2"),
        (f"{ALICE}\nschlüssel-schlüssel", 0o600, "key 2"),
        (b"\xff" * 40, 0o600, "not text"),
        ("a" * (1 << 21), 0o600, "larger"),
        ("\n".join(f"key-number-{n:010}" for n in range(1001)), 0o600, "at most 1000"),
    ],
    ids=range(11),
)
def test_key_files_that_are_refused(tmp_path: Path, text: str, mode: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path / "keys", text, mode), {})
    message = str(caught.value)
    assert words in message and "keys" in message
    assert ALICE not in message and "short-secret" not in message and "two words" not in message


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(written(tmp_path / "keys", ALICE))
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir()
    for name, words in (("link", "link"), ("pipe", "regular"), ("folder", "regular"), ("none", "openssl")):
        with pytest.raises(ConfigError, match=words):
            load(tmp_path / name, {})
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to user"):
        load(tmp_path / "keys", {})


def test_keys_of_the_environment() -> None:
    assert len(load(None, {})) == 0 == len(load(None, {"STOWAGE_API_KEYS": ""}))
    assert len(load(None, {"STOWAGE_API_KEYS": f"{ALICE}, {BOB},{ALICE},"})) == 2
    for wrong in (",", " ", "short", f"{ALICE},short"):
        with pytest.raises(ConfigError, match="STOWAGE_API_KEYS") as caught:
            load(None, {"STOWAGE_API_KEYS": wrong})
        assert ALICE not in str(caught.value)


# without keys


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("192.168.0.5", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_a_name_that_somebody_else_made_up_is_refused(open_server: Server, host: str, status: int) -> None:
    """A web page may let its own name point to this machine; then its browser sends that name."""
    response = httpx.get(open_server.url + "/v1/models", headers={"host": host})
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "host_not_allowed"


def test_a_page_of_another_origin_may_not_read(open_server: Server) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    response = httpx.options(open_server.url + "/v1/completions", headers=headers)
    assert response.status_code == 405
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.fixture(scope="module")
def open_server(start) -> Server:
    return start()


def test_insecure_serves_everybody_under_any_name(start) -> None:
    server = start("--host", "0.0.0.0", "--insecure")
    port = server.port
    url = f"http://127.0.0.1:{port}"
    assert httpx.get(url + "/v1/models", headers={"host": "my.server.example"}).status_code == 200
    server.url = url
    server.stop()
