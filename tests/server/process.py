"""`stowage serve` in a process of its own, forked from one that has everything imported, so that it starts quickly."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.nursery import Child, Nursery, wait_until


def warm() -> None:
    """What every server imports."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    import uvicorn.protocols.http.h11_impl  # noqa: F401

    import stowage.cli.app
    import stowage.engine.engine
    import stowage.server.serve  # noqa: F401

    torch.set_num_threads(1)


def command(out: str, err: str, environ: str, *arguments: str) -> None:
    """The command with its streams in files; returns when it ends well, and raises otherwise."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.update(json.loads(environ))
    sys.argv = ["stowage", *arguments]
    from stowage.cli.app import app

    try:
        app()
    except SystemExit as end:
        assert not end.code, end.code


class Server:
    """A server that takes requests."""

    def __init__(self, child: Child, out: Path, err: Path) -> None:
        self.child = child
        self.err = err
        wait_until(lambda: (out.exists() and out.read_text().endswith("\n")) or not child.alive(), "ready")
        assert child.alive(), err.read_text()
        self.told: dict[str, Any] = json.loads(out.read_text().splitlines()[0])
        self.url: str = self.told["url"]
        self.model: str = self.told["model"]
        self.port = int(self.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self.child.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGTERM; it must end well."""
        self.signal(signal.SIGTERM)
        assert self.child.wait() == 0, self.err.read_text()

    def metrics(self, **headers: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """What /metrics says, by name and labels."""
        text = httpx.get(self.url + "/metrics", headers=headers, timeout=60).raise_for_status().text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        """The sum of one metric over the labels that are not given."""
        wanted = set(labels.items())
        return sum(value for (found, at), value in self.metrics().items() if found == name and wanted <= set(at))

    def idle(self) -> bool:
        """Nothing is open, and no block of the device belongs to anybody."""
        found = self.metrics()
        return not found["stowage_choices_open", ()] and not sum(
            value for (name, _), value in found.items() if name == "stowage_device_blocks_used"
        )


def start(nursery: Nursery, directory: Path, model: Path, *flags: str, **environ: str) -> Server:
    """A server on a port of its own, whose streams lie in `directory`."""
    number = time.monotonic_ns()
    out, err = directory / f"{number}.out", directory / f"{number}.err"
    settings = ["serve", str(model), "--port", "0", "--json", "--kv-cache-memory", "8MiB", *flags]
    return Server(nursery.start(command, out, err, json.dumps(environ), *settings), out, err)
