"""Measures this machine's memory, disk and compute speeds once, and caches the result for predictions.

Owns the cached file, one for each combination of processor, cores, torch version and file system. torch computes in a
process of its own, with its own threads and memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stowage.config.memory import nearest_directory
from stowage.errors import ConfigError, StowageError
from stowage.models.state_directory import default_state_directory, put_in_place
from stowage.planner import storage
from stowage.planner.machine import Machine, by_format, by_number, from_json

DEPTHS = (1, 4, 8)
_TIMEOUT_S = 600.0
_MEMORY_BYTES = 128 << 20


def remembered(directory: Path | None = None) -> Machine | None:
    """The cached measurement of this machine and the disk of ``directory``; ``None`` where there is none."""
    key = machine_key(directory)
    try:
        machine = from_json(_file_of(key).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError):
        return None
    return machine if machine.key == key else None


def measure(
    directory: Path | None = None,
    *,
    say: Callable[[str], object] = lambda text: None,
    file_bytes: int = storage.FILE_BYTES,
) -> Machine:
    """Measure this machine and the disk of ``directory`` (default: that of the cached file), and cache the result.

    ``say`` reports progress. ``file_bytes``: size of the file that the disk is measured with. Raises
    ``DirectoryError`` where the disk cannot be measured, ``StowageError`` where computing fails.
    """
    where = directory or _made(default_state_directory())
    cores = len(os.sched_getaffinity(0))
    say("memory")
    memcpy_one, memcpy_all = (storage.memcpy_bytes_per_s(threads, _MEMORY_BYTES) for threads in (1, cores))
    say(f"the disk of {where}")
    with storage.written(where, file_bytes) as (path, written_bytes_per_s):
        reads = {depth: storage.read_bytes_per_s(path, depth) for depth in DEPTHS}
        buffered = storage.read_bytes_per_s(path, 1, direct=False)
        computed = _compute(say, path)
    device = computed.pop("device")
    computed.pop("threads")
    machine = Machine(
        name=f"{cpu_name()}, {cores} cores" + (f", {device}" if device else ""),
        cores=cores,
        disk_read=reads,
        disk_read_buffered=buffered,
        disk_write=written_bytes_per_s,
        key=machine_key(directory),
        products={name: by_number(rates) for name, rates in computed.pop("products").items()},
        formats=by_format(computed.pop("formats", {})),
        narrow=by_format(computed.pop("narrow", {})),
        overlap_loss=by_number(computed.pop("overlap_loss", {})),
        attention_steps=by_number(computed.pop("attention_steps", {})),
        memcpy_one=memcpy_one,
        memcpy_all=memcpy_all,
        **computed,
    )
    _remember(machine)
    return machine


def _compute(say: Callable[[str], object], file: Path) -> dict[str, Any]:
    """Runs ``compute`` as a process, and returns what it prints. ``file`` is read while it computes."""
    say("torch")
    command = [sys.executable, "-m", "stowage.planner.compute", str(file)]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None and process.stdout is not None
            heard = []
            for line in process.stderr:
                heard.append(line.rstrip())
                say(heard[-1])
            text = process.stdout.read()
            status = process.wait(timeout=_TIMEOUT_S)
        if status:
            raise StowageError(f"torch could not be measured: {heard[-1] if heard else f'status {status}'}")
        found: dict[str, Any] = json.loads(text)
        return found
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise StowageError(f"torch could not be measured: {error}") from error


def machine_key(directory: Path | None = None) -> str:
    """Everything that a measurement depends on, as readable text."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    where = nearest_directory(directory or default_state_directory())
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return f"{cpu_name()} | {cores} cores | torch {torch} | threads {threads or cores} | device {where.stat().st_dev}"


def cpu_name() -> str:
    """The processor's name with family and model: virtual machines give several generations one name (`AMD EPYC`)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    said: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        said.setdefault(name.strip(), value.strip())
    name = said.get("model name") or platform.processor() or "unknown processor"
    if "cpu family" not in said or "model" not in said:
        return name
    return f"{name} (family {said['cpu family']}, model {said['model']})"


def _file_of(key: str) -> Path:
    return default_state_directory() / f"machine-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _made(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error}. Give a directory: stowage probe --dir DIR") from error
    return directory


def _remember(machine: Machine) -> None:
    """Write the cached file atomically; where that fails, the next run measures again."""
    put_in_place(_file_of(machine.key), json.dumps(machine.to_json()))


def rows(machine: Machine) -> list[tuple[str, str]]:
    """Name and speed, for a table."""
    found = [
        ("memory copy, 1 thread", _rate(machine.memcpy_one)),
        (f"memory copy, {machine.cores} threads", _rate(machine.memcpy_all)),
        *((f"disk read, direct, {depth} x 1 MiB in flight", _rate(rate)) for depth, rate in machine.disk_read.items()),
        ("disk read, buffered, not cached", _rate(machine.disk_read_buffered)),
        ("disk write, synced", _rate(machine.disk_write)),
    ]
    if machine.stream_bytes_per_s:
        found.append(("weights from the disk, through a ring", _rate(machine.stream_bytes_per_s)))
        for count, loss in machine.overlap_loss.items():
            name = f"computing {count} row{'s' * (count > 1)} while reading: longer by, of the time of reading"
            found.append((name, f"{loss:.0%}"))
        found.append(("weights in a mapped file: longer by", f"{machine.mapped_byte_s * 1e12:.1f} ms per GB"))
    for dtype, rates in machine.products.items():
        found += _computed(dtype, rates, machine)
    found += _in_formats(machine)
    if machine.has_device:
        found += [("link to the device", _rate(machine.link_in)), ("link from the device", _rate(machine.link_out))]
    for count, rate in machine.attention_steps.items():
        name = f"attention when decoding, batch {count}, besides reading keys"
        found.append((name, f"{rate / 1e9:,.0f} G operations/s"))
    if machine.elements_per_s:
        found.append(("activations, besides products", f"{machine.elements_per_s / 1e9:,.2f} G/s"))
    parts = {
        "a step": machine.step_s,
        "a layer": machine.layer_s,
        "a sequence of a batch, each layer": machine.sequence_s,
        "drawing a token, of a thousand logits": 1000 * machine.logit_s,
    }
    parts |= {"a layer's router": machine.mixture_s, "an expert": machine.expert_s}
    return [*found, *((f"{name}, besides products", f"{s * 1000:.3f} ms") for name, s in parts.items() if s)]


def _computed(dtype: str, rates: Mapping[int, float], machine: Machine) -> list[tuple[str, str]]:
    most = max(rates)
    found = [
        (f"decode in {dtype}, batch {rows}: weights read", _rate(machine.cache_bytes_per_s(dtype) * rate / rates[1]))
        for rows, rate in rates.items()
        if rows <= 8
    ]
    prefill = f"{2 * most * rates[most] / 1e9:,.0f} G operations/s"
    return [*found, (f"prefill in {dtype}, {most} tokens", prefill)]


def _in_formats(machine: Machine) -> list[tuple[str, str]]:
    """Speeds of products in each format, for the first dtype that has any."""
    dtype, formats = next(iter(machine.formats.items()), ("", {}))
    return [
        (
            f"{name}, {', '.join(map(str, times))} rows: times {dtype}",
            ", ".join(f"{1 / many:.2f}" for many in times.values()),
        )
        for name, times in formats.items()
    ]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.2f} GB/s"
