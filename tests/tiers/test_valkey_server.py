"""What a server may do to us: restart, forget, be full, ask for a password and TLS, be a cluster."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stowage.errors import ConfigError
from stowage.storage.remote.replies import ReplyBounds
from stowage.storage.remote.tier import RemoteTier
from tests.ports import free_port
from tests.tier_client import key
from tests.tiers.client import Client
from tests.tiers.odd_server import odd_server
from tests.tiers.servers import RedisServer, make_certificates, redis_server, wait_until

Open = Callable[..., RemoteTier]
MIB = 1 << 20


def again(client: Client, numbers: range) -> None:
    """Store until the server is back."""
    until_s = time.monotonic() + 60
    while not client.store(numbers).ok.all():
        assert time.monotonic() < until_s, "the tier does not come back"


def test_a_server_that_restarts_has_forgotten_everything(tiers: Open) -> None:
    with redis_server() as server:
        client = Client(tiers(server.url))
        assert client.store(range(8)).ok.all() and client.load(range(8)).ok.all()
        server.stop()
        assert not client.load(range(8), seconds=1.0).ok.any()
        assert not client.store(range(8, 10), seconds=1.0).ok.any()
        server.start()
        until_s = time.monotonic() + 60
        while client.count("vanished") < 8:
            assert not client.load(range(8)).ok.any()
            assert time.monotonic() < until_s
        again(client, range(8))
        assert client.load(range(8)).ok.all() and client.count("corrupt") == 0


def test_a_connection_that_died_meanwhile_costs_nothing(tiers: Open) -> None:
    """The next transfer finds out, and tries again on a new one."""
    with redis_server() as server:
        client = Client(tiers(server.url))
        client.store(range(8))
        for _ in range(3):
            server.client.client_kill_filter(_type="normal", skipme=True)
            assert client.load(range(8)).ok.all()


def test_flushall_is_a_miss(tiers: Open) -> None:
    with redis_server() as server:
        client = Client(tiers(server.url))
        client.store(range(8))
        server.client.flushall()
        assert not client.load(range(8)).ok.any() and client.count("vanished") == 8
        client.tier.discard([key(number) for number in range(8)])
        assert client.probe(range(8)) == [0] * 8 and client.store(range(8)).ok.all()
        assert client.load(range(8)).ok.all()


def test_a_server_that_evicts_loses_chunks_and_nothing_else(tiers: Open) -> None:
    with redis_server("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru") as server:
        client = Client(tiers(server.url))
        for number in range(40):
            assert client.store([number], length=MIB // 2).ok.all()
        found = [client.load([number], length=MIB // 2).ok.tolist()[0] for number in range(40)]
        assert 0 < sum(found) < 24 and found[-1]
        assert client.count("vanished") == 40 - sum(found) and client.count("corrupt") == 0


def test_a_server_that_is_full_costs_hits_and_no_loads(tiers: Open) -> None:
    with redis_server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        now_s = [time.monotonic()]
        client = Client(tiers(server.url, clock=lambda: now_s[0]))
        number = 0
        while (outcome := client.store([number], length=MIB // 2)).ok.all():
            number += 1
            assert number < 50
        assert outcome.refused, "no reason to leave alone what can be loaded"
        assert number > 0 and client.count("no_room") == 1
        assert client.load(range(number), length=MIB // 2).ok.all()
        assert not client.store([98], length=MIB // 2).ok.any() and client.count("backed_off") == 1, (
            "left alone a while"
        )
        assert client.tier.stats()["healthy"] == 1
        server.client.flushall()
        now_s[0] += 1.0
        assert client.store([99], length=MIB // 2).ok.all()


def test_what_nobody_uses_is_forgotten(tiers: Open, redis: RedisServer) -> None:
    prefix = f"ttl-{time.monotonic_ns()}"
    client = Client(tiers(f"{redis.url}?prefix={prefix}", ttl_s=100.0))
    client.store(range(2))
    names = set(redis.client.scan_iter(f"{prefix}:*", count=10_000))
    assert len(names) == 2 and all(90_000 < redis.client.pttl(name) <= 100_000 for name in names)
    for name in names:
        redis.client.pexpire(name, 50_000)
    assert client.load([0]).ok.all()
    assert sorted(redis.client.pttl(name) > 90_000 for name in names) == [False, True], "a load keeps it alive"
    for_ever = Client(tiers(f"{redis.url}?prefix={prefix}x", ttl_s=0.0))
    for_ever.store([0])
    for_ever.load([0])
    (name,) = redis.client.scan_iter(f"{prefix}x:*", count=10_000)
    assert redis.client.pttl(name) == -1


def test_connections_are_named_and_bounded(tiers: Open) -> None:
    with redis_server() as server:
        client = Client(tiers(server.url))
        for number in range(20):
            client.start("store", range(4 * number, 4 * number + 4), 100_000, 1, time.monotonic() + 60)
            client.start("load", range(4 * number, 4 * number + 4), 100_000, 0, time.monotonic() + 60)
        client.outcomes(40)
        named = [one for one in server.client.client_list() if str(one["name"]).startswith("stowage-")]
        assert 0 < len(named) <= 8
        client.tier.close(time.monotonic() + 5)
        wait_until(
            lambda: not [one for one in server.client.client_list() if str(one["name"]).startswith("stowage-")],
            what="the end of the connections",
        )


@pytest.mark.parametrize("user", ["", "engine"])
def test_a_password(user: str, tiers: Open, caplog: pytest.LogCaptureFixture) -> None:
    users = ("--user", "engine", "on", ">hush", "~*", "+@all") if user else ("--requirepass", "hush")
    with redis_server(*users, username=user or None, password="hush") as server:
        place = f"127.0.0.1:{server.port}"
        for good in (
            tiers(f"redis://{user}:hush@{place}"),
            tiers(f"redis://{user}{'@' if user else ''}{place}", password="hush"),
        ):
            client = Client(good)
            assert client.store(range(3)).ok.all() and client.load(range(3)).ok.all()
        wrong = Client(tiers(f"redis://{user}:hash@{place}"))
        assert not wrong.load(range(3)).ok.any() and not wrong.store(range(3)).ok.any()
        if not user:
            without = Client(tiers(f"redis://{place}"))
            assert not without.load(range(3)).ok.any() and without.count("corrupt") == 0
        assert "hash" not in caplog.text and "hush" not in caplog.text and "refused the password" in caplog.text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"-MOVED 3999 127.0.0.1:6381\r\n", "add cluster=true"),
        (b"-\r\n", "said nothing"),
        (b"-OddError with something secret\r\n", "said OddError"),
        (b":7\r\n", "does not answer as"),
        (b"*2\r\n$1\r\na\r\n$1\r\nb\r\n", "does not answer as"),
        (b"$-1\r\n", "does not answer as"),
        (b"nonsense\r\n", "no connection"),
    ],
)
def test_a_server_that_answers_oddly(answer: bytes, words: str, tiers: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is loaded, nothing breaks, and the log says what it is."""
    with odd_server(answer) as port:
        client = Client(tiers(f"redis://127.0.0.1:{port}"))
        assert not client.load(range(3), seconds=5.0).ok.any()
        client.probe(range(3))
        client.store(range(3), seconds=5.0)
        assert client.count("faults") == client.count("reads") == 0
        assert words in caplog.text and "secret" not in caplog.text


HOSTILE = {
    "a list without end": b"*2147483647\r\n",
    "a list that comes": b"*2147483647\r\n" + b":1\r\n" * 1_000_000,
    "lists in lists": b"*1\r\n" * 100_000,
    "many lists": b"*1000\r\n" * 8 + b"*1000\r\n" * 10_000,
    "a value without end": b"$2147483647\r\n" + b"x" * 1_000_000,
    "a line without end": b"+" + b"x" * 10_000_000,
    "no length": b"$many\r\n",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_a_server_that_answers_without_end(answer: bytes, tiers: Open) -> None:
    """A list of 2**31 elements took the client a minute, in which no deadline was kept."""
    with odd_server(answer) as port:
        client = Client(tiers(f"redis://127.0.0.1:{port}"))
        assert not client.load(range(3), seconds=2.0).ok.any()
        client.probe(range(3))
        assert not client.store(range(3), seconds=2.0).ok.any()
        assert client.count("faults") == 0


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_bounds_follow_any_reply_however_it_is_cut(size: int) -> None:
    replies = b"+OK\r\n:7\r\n$-1\r\n*-1\r\n*0\r\n$0\r\n\r\n$5\r\n*99\r\n\r\n-ERR no\r\n"
    replies += b"*2\r\n*3\r\n:0\r\n:9\r\n*2\r\n$1\r\na\r\n:1\r\n+x\r\n"
    bounds = ReplyBounds()
    for _ in range(300):
        for begin in range(0, len(replies), size):
            bounds.feed(replies[begin : begin + size])
    assert not bounds._left and not bounds._skip_bytes and not bounds._line
    with pytest.raises(ConnectionError):
        bounds.feed(b"*1048577\r\n")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, Path]]:
    directory = tmp_path_factory.mktemp("tls")
    authority, certificate, key = make_certificates(directory)
    port = free_port()
    files = ("--tls-ca-cert-file", str(authority), "--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    options = ("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", *files)
    server = RedisServer(*options, port=port, ssl=True, ssl_ca_certs=str(authority))
    try:
        yield server, authority
    finally:
        server.client.close()
        server.stop()


def test_tls(tls: tuple[RedisServer, Path], tiers: Open, tmp_path: Path) -> None:
    server, authority = tls
    client = Client(tiers(f"rediss://127.0.0.1:{server.port}?ca_file={authority}"))
    assert client.store(range(10), length=100_000).ok.all() and client.load(range(10), length=100_000).ok.all()
    stranger, _, _ = make_certificates(tmp_path)
    for url in (
        f"rediss://127.0.0.1:{server.port}",
        f"rediss://127.0.0.1:{server.port}?ca_file={stranger}",
        f"rediss://localhost:{server.port}?ca_file={authority}",
        f"redis://127.0.0.1:{server.port}",
    ):
        distrusting = Client(tiers(url, request_timeout_s=0.5))
        assert not distrusting.load(range(10), length=100_000, seconds=2.0).ok.any(), url
    with pytest.raises(ConfigError, match="cannot be read"):
        tiers(f"rediss://127.0.0.1:{server.port}?ca_file={tmp_path / 'none'}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Three nodes on one machine; skipped where nothing can put them together."""
    nodes: list[RedisServer] = []
    try:
        for number in range(3):
            home = tmp_path / str(number)
            home.mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--dir", str(home))
            nodes.append(RedisServer(*options, "--cluster-port", str(free_port())))
        _join(nodes)
        yield nodes
    finally:
        for node in nodes:
            node.client.close()
            node.stop()


def _join(nodes: list[RedisServer]) -> None:
    for number, node in enumerate(nodes):
        node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * 5462, min(number * 5462 + 5461, 16383))
        node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for node in nodes[1:]:
        port = node.client.config_get("cluster-port")["cluster-port"]
        nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, port)
    for node in nodes:
        wait_until(lambda node=node: node.client.cluster("INFO")["cluster_state"] == "ok", what="the cluster")
        wait_until(lambda node=node: node.client.cluster("INFO")["cluster_known_nodes"] == "3", what="the cluster")


@pytest.mark.rare
@pytest.mark.slow
def test_a_cluster(cluster: list[RedisServer], tiers: Open) -> None:
    url = f"redis://127.0.0.1:{cluster[1].port}?cluster=true"
    client = Client(tiers(url))
    assert client.store(range(60), mask=3).ok.all()
    sizes = [node.client.dbsize() for node in cluster]
    assert sum(sizes) == 60 and min(sizes) >= 5, "spread over the nodes"
    other = Client(tiers(url))
    assert other.probe(range(70), mask=3) == [3] * 60 + [0] * 10 and other.load(range(60)).ok.all()
    cluster[2].stop()
    outcome = other.load(range(60), seconds=5.0)
    assert sum(outcome.ok.tolist()) in (0, 60 - sizes[2]), "what lay on the node that died is a miss"
    cluster[2].start()
    until_s = time.monotonic() + 60
    while not other.store(range(60), seconds=5.0).ok.all():
        assert time.monotonic() < until_s, "the cluster does not come back"
    assert other.load(range(60)).ok.all() and other.count("corrupt") == 0
    if (tool := cluster[0]._command[0].replace("-server", "-cli")) and Path(tool).exists():
        subprocess.run([tool, "-p", str(cluster[0].port), "cluster", "info"], check=True, capture_output=True)
