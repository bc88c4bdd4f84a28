"""Nothing of what users say, nor what protects it, reaches a log: at any level, in any format, in trouble or not."""

from __future__ import annotations

import errno
import functools
import logging

import pytest

from stowage.cache import opening
from stowage.config.memory import Memory
from stowage.core.key import SequenceKeys
from stowage.engine.completion import namespace_of
from stowage.engine.engine import Engine
from stowage.log import JsonFormatter, TextFormatter
from stowage.storage import key_file
from stowage.storage.disk import DiskTier
from stowage.storage.disk.system import System
from stowage.testing.faults import FaultyFileSystem
from tests.engine.conftest import greedy

PROMPT = "The code of the vault is opossum-4711-ferret. " * 12
ENGINE_SALT = "salt-of-the-engine-7f3a"
TENANT_SALT = "salt-of-the-tenant-91bc"


class Everything(logging.Handler):
    """All that any handler could write of a record."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []
        self.events: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts += [JsonFormatter().format(record), TextFormatter().format(record), repr(vars(record))]
        self.events.add(getattr(record, "stowage_event", ""))


@pytest.fixture
def log():
    handler = Everything()
    logger = logging.getLogger("stowage")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def secrets_of(engine: Engine, tokens: list[int], namespace_keys: list[bytes], secret: str) -> list[str]:
    """The texts that must not appear. Four tokens in a row are too many."""
    texts = ["opossum", "vault is", ENGINE_SALT, TENANT_SALT, secret, engine.parts.namespace.hex()]
    for at in range(len(tokens) - 4):
        for between in (", ", " ", ","):
            texts.append(between.join(map(str, tokens[at : at + 4])))
    for key in namespace_keys:
        texts += [key.hex(), repr(key)[2:-1]]
    return texts


@pytest.mark.parametrize("protection", ["checksum", "blake3"])
def test_no_prompt_token_key_or_salt_is_logged(protection, checkpoints, tmp_path, log, monkeypatch):
    faults = FaultyFileSystem()
    monkeypatch.setattr(opening, "DiskTier", functools.partial(DiskTier, system=System(files=faults)))
    secret = ""
    options = {"disk_protection": protection}
    if protection != "checksum":
        path = tmp_path / "keys"
        key_file.make(path)
        options["disk_key_file"] = str(path)
        secret = key_file.read(path)[0].reveal()
    memory = Memory(kv_cache_memory="8MiB", host_memory="2MiB", disk=f"{tmp_path / 'cache'}:64MiB", **options)
    with Engine(checkpoints("llama"), memory, salt=ENGINE_SALT) as engine:
        tokens = engine.tokenizer.encode(PROMPT)

        def ask() -> None:
            engine.drop_device_cache()
            engine.drop_host()
            engine.forget_costs()
            engine.generate([PROMPT], greedy(4), salt=TENANT_SALT)
            engine.flush()

        ask()
        chain = SequenceKeys(namespace_of(engine.parts.namespace, TENANT_SALT), engine.parts.layout.groups)
        chain.extend(tokens, len(tokens))
        known = chain.of(0)
        assert engine.store.tiers[0].lookup(known).all()
        assert len(known) > 3
        faults.rot(12345)
        ask()
        faults.heal()
        faults.fail("preadv", errno.EIO)
        ask()
        faults.heal()
        faults.fail("pwritev", errno.ENOSPC)
        engine.generate([PROMPT[::-1]], greedy(4), salt=TENANT_SALT)
        engine.flush()
        monkeypatch.setattr("stowage.storage.disk.loader.make_plan", lambda *_: [][tokens[0]])
        faults.heal()
        ask()
        wanted = secrets_of(engine, tokens, known, secret)
    assert {"corrupt", "read_errors", "enospc", "fault"} <= log.events, "there was something to be told"
    written = "\n".join(log.texts)
    assert [text for text in wanted if text and text in written] == []
