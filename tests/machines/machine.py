"""A machine: one process with an engine of its own, inside its place of the network. It shares nothing but a store.

`Machine` is what the test has in its hand; `live` is what runs in the process. They talk through a socket in the file
system, which no network comes between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Protocol

from tests.machines.network import enter
from tests.server import process

PATIENCE_S = 90.0
"""When a machine counts as hanging. No test waits that long where all is well."""
MEMORY = {"kv_cache_memory": "16MiB", "host_memory": "32MiB", "snapshot_tokens": 128, "lookup_timeout_s": 30.0}
"""Patient: a tiny model computes in the time that a question takes."""

_numbers = itertools.count()


class Process(Protocol):
    """What a machine runs in: a `Child`, for one. Each of the two waits for its end; once."""

    def kill(self) -> None: ...

    def wait(self) -> int:
        """0: it ended well."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a machine answered, where the prompt's tokens came from, and seconds from asking to the first token."""

    tokens: list[int]
    reused: dict[str, int]
    ttft_s: float


def warm() -> None:
    """What every machine imports."""
    process.warm()
    import obstore.store
    import redis.asyncio  # noqa: F401
    import transformers.models.gemma3.modeling_gemma3
    import transformers.models.qwen3_next.modeling_qwen3_next  # noqa: F401

    assert obstore.store


def live(place: str, socket: str, model: str, memory: dict[str, Any], environ: dict[str, str]) -> None:
    """Answer calls until `close`."""
    enter(place)
    os.environ.update(environ)
    from stowage.config.memory import Memory
    from stowage.engine.engine import Engine

    with Engine(model, Memory(**memory)) as engine:
        talk(socket, engine)
        engine.check()


def talk(socket: str, engine: Any) -> None:
    """Do what the other end of the line says, until it says no more."""
    with Client(socket, "AF_UNIX") as line:
        line.send("ready")
        while (call := line.recv()) is not None:
            line.send(getattr(_Life(engine), call[0])(*call[1:]))


class _Life:
    """What a machine can be told."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def ask(self, prompt: list[int], new_tokens: int, load_always: bool = True) -> Answer:
        """`load_always`: a tiny model is quicker than any network; what is there is loaded all the same."""
        from stowage.engine.sampling_params import SamplingParams

        if load_always:
            self._engine.forget_costs()
        (completion,) = self._engine.generate([prompt], SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
        reused = {tier: count for tier, count in completion.reused_tokens.items() if count}
        return Answer(completion.token_ids, reused, completion.ttft_s)

    def flush(self, seconds: float) -> bool:
        done: bool = self._engine.flush(seconds)
        return done

    def forget(self) -> None:
        """Device and host are empty afterwards: all that is reused comes from below."""
        self._engine.drop_device_cache()
        self._engine.drop_host()

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self._engine.stats()["store"]
        return found


class Machine:
    """One process. Every call ends, or fails after `PATIENCE_S`. `begin` starts it, and is told where to call."""

    def __init__(self, directory: Path, begin: Callable[[str], Process]) -> None:
        socket = str(directory / f"machine-{next(_numbers)}")
        with Listener(socket, "AF_UNIX") as listener:
            self._process = begin(socket)
            self._line: Connection[Any, Any] = listener.accept()
        self._ended = False
        self.hear()

    def say(self, name: str, *arguments: object) -> None:
        """Tell it, and do not wait."""
        self._line.send((name, *arguments))

    def hear(self) -> Any:
        """What it says to that."""
        assert self._line.poll(PATIENCE_S), "the machine hangs"
        return self._line.recv()

    def ask(self, prompt: list[int], new_tokens: int = 12, load_always: bool = True) -> Answer:
        self.say("ask", prompt, new_tokens, load_always)
        answer: Answer = self.hear()
        return answer

    def flush(self) -> None:
        """Everything is in the store."""
        self.say("flush", 60.0)
        assert self.hear(), "it is not written"

    def forget(self) -> None:
        self.say("forget")
        self.hear()

    def stats(self) -> dict[str, Any]:
        self.say("stats")
        found: dict[str, Any] = self.hear()
        return found

    def kill(self) -> None:
        self._ended = True
        self._process.kill()
        self._line.close()

    def close(self) -> None:
        """An orderly end: its invariants hold, and it ends well. Once; again, or after `kill`, it does nothing."""
        if not self._ended:
            self._ended = True
            self._line.send(None)
            assert self._process.wait() == 0
            self._line.close()

    def drop(self) -> None:
        """For a test's end, whatever happened in it."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(AssertionError):
                self._process.kill()
            self._line.close()


def serve(place: str, out: str, err: str, environ: str, *arguments: str) -> None:
    """`stowage serve` inside a place."""
    enter(place)
    process.command(out, err, environ, *arguments)
