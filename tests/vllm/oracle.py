"""The test's side: engines in processes of their own, and what it means that KV came back exactly.

Runs of one request at a time are deterministic to the bit in vLLM, but a prompt that is computed in one piece and one
of which a part was cached are not computed in the same shapes. So what a load from the connector is held against is
vLLM's own hit of the same length: every log-probability equal, difference 0. In between every byte of the device's
cache is overwritten.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.nursery import ROOT, Child, Nursery, python_path
from tests.vllm import driver
from tests.vllm.models import VOCAB, Family

ANSWER_TOKENS = 6
REPLY_S = 900.0
"""For one answer of a driver: an engine that takes longer to start, or for its requests, hangs."""
USUAL: Mapping[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 << 20,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,  # states of recurrent layers are kept where a step ends
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "seed": 0,
}


class EngineError(Exception):
    """What was asked of an engine raised: the type, the message, and the traceback."""


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them special."""
    drawn = random.Random(seed)
    return [drawn.randrange(5, VOCAB) for _ in range(tokens)]


def connector(
    host: str | None = "64MiB", disk: Path | None = None, disk_limit: str = "256MiB", **more: Any
) -> dict[str, Any]:
    """vLLM's setting for the plugin."""
    extra = {
        **({"host_memory": host} if host is not None else {}),
        **({"disk": f"{disk}:{disk_limit}"} if disk else {}),
        "close_timeout_s": 120,
        **more,
    }
    return {
        "kv_connector": "StowageConnector",
        "kv_connector_module_path": "stowage.plugins.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@dataclass(frozen=True)
class Answer:
    """``logprobs`` of the most likely tokens at each step, and which these were (``tops``). ``local`` and ``external``:
    prompt tokens that were not computed, because the device or the connector had them.
    """

    tokens: list[int]
    logprobs: list[list[float]]
    tops: list[list[int]]
    finish: str
    local: int
    external: int

    def distance(self, other: Answer) -> float:
        """The largest difference of a log-probability; infinite when other tokens were in question."""
        if self.tops != other.tops or self.tokens != other.tokens:
            return float("inf")
        mine, others = itertools.chain(*self.logprobs), itertools.chain(*other.logprobs)
        return max((abs(one - two) for one, two in zip(mine, others, strict=True)), default=0.0)


class Engine:
    """One vLLM engine. What ``driver.Driver`` can do can be asked of it: ``engine.ask("reset", connector=False)``."""

    def __init__(self, connection: socket.socket, process: Child | subprocess.Popen[bytes], log: Path) -> None:
        self._connection = connection
        self._stream = connection.makefile("rw", encoding="ascii", newline="\n")
        self._process = process
        self.log = log
        self._names = itertools.count()
        self._ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> Any:
        """Raises EngineError if it raised there."""
        self._stream.write(json.dumps({"do": do, "with": arguments}) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise EngineError(f"the engine's process is gone; its log ends:\n{self.log_tail()}")
        told = json.loads(line)
        if "error" in told:
            raise EngineError(f"{told['error']}\n{told['trace']}")
        return told["answer"]

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    # Requests

    def add(
        self, tokens: Sequence[int], new_tokens: int = ANSWER_TOKENS, *, logprobs: int = 4, salt: str | None = None
    ) -> str:
        """Queue a request; its name."""
        name = f"r{next(self._names)}"
        self.ask("add", name=name, prompt=list(tokens), new_tokens=new_tokens, logprobs=logprobs, salt=salt)
        return name

    def finish(self) -> dict[str, Answer]:
        """The answers of all that was queued, by name."""
        return {name: Answer(**told) for name, told in self.ask("finish").items()}

    def generate(self, tokens: Sequence[int], new_tokens: int = ANSWER_TOKENS, *, salt: str | None = None) -> Answer:
        """One request by itself."""
        name = self.add(tokens, new_tokens, salt=salt)
        return self.finish()[name]

    def generate_all(self, prompts: Sequence[Sequence[int]], new_tokens: int = ANSWER_TOKENS) -> list[Answer]:
        """Together; in the order of the prompts."""
        names = [self.add(tokens, new_tokens) for tokens in prompts]
        answers = self.finish()
        return [answers[name] for name in names]

    # The cache

    def forget(self) -> None:
        """The device has nothing any more: its prefix cache is reset and every byte of it overwritten."""
        assert self.ask("reset", connector=False)
        assert self.ask("scribble") > 1 << 20

    def stats(self) -> dict[str, float]:
        numbers: dict[str, float] = self.ask("stats")
        return numbers

    def counted(self, name: str) -> float:
        """The sum of the connector's numbers with that last name, of every tier."""
        return sum(value for key, value in self.stats().items() if key.rpartition(".")[2] == name)

    def hits(self, tier: str) -> float:
        """Chunks that were found in that tier first."""
        return self.stats().get(f"hits.{tier}", 0)

    # The end

    def close(self) -> None:
        """As vLLM ends: the connector may finish what it has under way."""
        if not self._ended:
            self._ended = True
            self.ask("close")
            self._process.wait()
            self._connection.close()

    def kill(self) -> None:
        """SIGKILL."""
        if not self._ended:
            self._ended = True
            if isinstance(self._process, Child):
                self._process.kill()
            else:
                self._process.kill()
                assert self._process.wait() == -signal.SIGKILL
            self._connection.close()


class Engines:
    """Starts engines on models that it writes once, with sockets and logs in ``directory``."""

    def __init__(self, nursery: Nursery, directory: Path) -> None:
        self._nursery = nursery
        self._directory = directory
        self._models: dict[str, Path] = {}
        self._started: list[Engine] = []
        self._numbers = itertools.count()

    def model(self, name: str, family: Family, seed: int | str = 0) -> Path:
        """Its checkpoint."""
        from tests.vllm.models import write

        key = f"{name}-{seed}"
        if key not in self._models:
            self._models[key] = write(family, self._directory / f"model-{key}", int(seed))
        return self._models[key]

    def start(
        self,
        name: str,
        family: Family,
        transfer: Mapping[str, Any] | None = None,
        *,
        fresh: bool = False,
        seed: int | str = 0,
        prepare: Sequence[str] = (),
        mount: tuple[Path, int] | None = None,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Engine:
        """An engine that takes requests. ``fresh``: in an interpreter of its own, with ``environ``, instead of forked.

        Raises EngineError if vLLM or the connector refuses.
        """
        engine = self._connect(fresh, environ or {})
        self._started.append(engine)
        needed = ["torchvision"] if family.model_type.startswith("qwen3_5") else []
        engine.ask("prepare", names=["patient", *needed, *prepare])
        if mount is not None and not engine.ask("mount", path=str(mount[0]), mebibytes=mount[1]):
            raise PermissionError("no right to mount")
        transferred = {"kv_transfer_config": dict(transfer)} if transfer else {}
        told = {**USUAL, "dtype": family.dtype, **family.options, **transferred, **options}
        engine.ask("start", model=str(self.model(name, family, seed)), options=told)
        return engine

    def _connect(self, fresh: bool, environ: Mapping[str, str]) -> Engine:
        number = next(self._numbers)
        path, log = self._directory / f"s{number}", self._directory / f"engine-{number}.log"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(REPLY_S)
            process = _interpreter(path, log, environ) if fresh else self._nursery.start(driver.run, path, log)
            connection, _ = listener.accept()
        connection.settimeout(REPLY_S)
        return Engine(connection, process, log)

    def shared_memory(self) -> set[str]:
        """What engines have left there."""
        return self._nursery.left_in_shared_memory()

    def end_all(self) -> None:
        """Kill what a test has left."""
        for engine in self._started:
            with contextlib.suppress(ProcessLookupError, AssertionError):
                engine.kill()
        self._started.clear()


def _interpreter(path: Path, log: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.vllm.driver", str(path), str(log)],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": python_path(), **environ},
        stdin=subprocess.DEVNULL,
        stdout=log.open("ab"),
        stderr=subprocess.STDOUT,
    )


def prove(engine: Engine, tokens: Sequence[int]) -> Answer:
    """Cold, vLLM's own hit, then the same from the connector with nothing left on the device: exactly equal. Returns
    vLLM's own hit.
    """
    cold = engine.generate(tokens)
    assert cold.local == cold.external == 0
    local = engine.generate(tokens)
    assert local.local > 0 and local.external == 0
    assert local.tokens == cold.tokens
    assert_comes_back(engine, tokens, local)
    return local


def assert_comes_back(engine: Engine, tokens: Sequence[int], local: Answer) -> Answer:
    """What ``local`` says was on the device comes back from the connector, all of it and exactly."""
    engine.forget()
    external = engine.generate(tokens)
    assert (external.local, external.external) == (0, local.local), "the connector's hit is as long as vLLM's own"
    assert external.distance(local) == 0.0, "the numbers are others"
    return external
