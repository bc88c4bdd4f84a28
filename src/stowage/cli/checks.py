"""The checks of ``stowage doctor``. Each check reads the machine, changes nothing that stays, and names the fix.

Versions are read from the installed packages' metadata, so nothing heavy is imported unless a device is named. The
check of direct reads writes one temporary file beside the cache and removes it.
"""

import importlib.metadata
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit

from stowage.config.addresses import shown, valkey_password
from stowage.config.disk_room import DISK_FULL, free_bytes
from stowage.config.memory import DISK_PROTECTIONS, Memory, format_size, nearest_directory, parse_disk, ram_total_bytes
from stowage.config.settings import Settings
from stowage.errors import ConfigError, StowageError
from stowage.extras import EXTRA_OF
from stowage.models.compat import NEWEST, OLDEST, series

if TYPE_CHECKING:
    from stowage.storage.remote.tier import RemoteTier

_DIRECT_BYTES = 4096
_SHARED_S = 5.0
_DRIVER = Path("/proc/driver/nvidia/version")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``problem`` keeps Stowage from working as asked; ``note`` costs speed or may surprise."""

    name: str
    level: Literal["ok", "note", "problem"]
    found: str
    fix: str = ""


def all_checks(settings: Settings) -> list[Check]:
    """What Stowage's own engine needs."""
    return [*check_packages(importlib.metadata.version), *machine_checks(settings), check_budgets(settings)]


def machine_checks(settings: Settings) -> list[Check]:
    """What every engine needs, in the order in which a reader would fix it."""
    return [
        check_python(),
        check_cores(),
        check_instructions(_processor_flags()),
        check_huge_pages(_HUGE_PAGES),
        check_device(settings["device"], _DRIVER.exists()),
        *check_disk(settings["disk"], settings.spelled),
        *check_protection(settings["disk_protection"], settings["disk_key_file"]),
        *check_shared(settings),
    ]


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("Python", "ok", version)
    return Check("Python", "note", f"{version}, which is not tested", "Use Python 3.11, 3.12 or 3.13.")


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a package's version."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def check_packages(version_of: Callable[[str], str]) -> list[Check]:
    """torch, transformers and the small packages, as installed. ``version_of`` raises PackageNotFoundError."""
    checks = []
    for name, wanted, fits in (
        ("torch", "2.11 or newer", lambda v: v >= (2, 11)),
        ("transformers", series(OLDEST) + " or newer", lambda v: v >= OLDEST),
        ("safetensors", "any", lambda v: True),
        ("blake3", "any", lambda v: True),
        ("xxhash", "any", lambda v: True),
    ):
        extra = f"stowage[{EXTRA_OF[name]}]" if name in EXTRA_OF else "stowage"
        fix = f"Run `make env` in a checkout, or: pip install '{extra}'"
        try:
            version = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(name, "problem", "not installed", fix))
            continue
        numbers = release(version)
        if name == "transformers" and numbers > NEWEST:
            fix = f"If something fails: pip install 'transformers=={series(NEWEST)}.*'"
            checks.append(Check(name, "note", f"{version}; tested up to {series(NEWEST)}", fix))
        elif fits(numbers):
            checks.append(Check(name, "ok", version))
        else:
            checks.append(Check(name, "problem", f"{version}; this version needs {wanted}", fix))
    return checks


def check_cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > cores:
        fix = f"Unset OMP_NUM_THREADS, or set it to at most {cores}: threads that share a core wait for each other."
        return Check("cores", "note", f"{cores} usable, but OMP_NUM_THREADS={threads}", fix)
    return Check("cores", "ok", f"{cores} usable")


def check_instructions(flags: frozenset[str]) -> Check:
    """Instruction sets that decide how fast a CPU computes. ``flags`` as in /proc/cpuinfo; empty = not known."""
    names = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 bf16", "amx_bf16": "AMX bf16"}
    names |= {"asimd": "NEON", "bf16": "bf16", "sve": "SVE"}
    if not flags:
        return Check("instruction sets", "note", "not known on this system")
    found = [text for flag, text in names.items() if flag in flags]
    if not flags & {"avx2", "asimd"}:
        return Check("instruction sets", "note", "neither AVX2 nor NEON", "Expect slow computing.")
    if not flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        fix = "Models in bfloat16 compute slowly here. Compare with --dtype float32, which needs twice the memory."
        return Check("instruction sets", "note", f"{', '.join(found)}; no bfloat16", fix)
    return Check("instruction sets", "ok", ", ".join(found))


def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, []))


def check_huge_pages(enabled: Path) -> Check:
    """Whether weights and the KV cache can lie in huge pages. ``enabled``: Linux's file, its choice in brackets."""
    name = "huge pages"
    try:
        choice = enabled.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        return Check(name, "ok", "not offered by this system")
    if choice != "never":
        return Check(name, "ok", choice)
    fix = f"As root: echo madvise > {enabled}. Decoding on the CPU takes 10 to 20 % longer without."
    return Check(name, "note", "turned off", fix)


def check_device(name: str, has_driver: bool) -> Check:
    """Whether the model can be computed where it is to be. ``has_driver``: there is a driver for NVIDIA's GPUs."""
    if name in ("", "cpu"):
        if not has_driver:
            return Check("device", "ok", "the CPU")
        return Check("device", "note", "the CPU, and there is a GPU", "Give --device cuda to compute on it.")
    from stowage.executor.device import resolve

    try:
        return Check("device", "ok", str(resolve(name)))
    except ConfigError as error:
        return Check("device", "problem", str(error), "Name a device that is there, or leave --device out.")


def check_budgets(settings: Settings) -> Check:
    """Whether budgets can be used, and fit into the machine's memory; another device than the CPU does not count."""
    try:
        memory: Memory = settings.memory()
    except ConfigError as error:
        return Check("budgets", "problem", settings.spelled(str(error)), "Change the setting that is named above.")
    total_bytes = ram_total_bytes()
    device_bytes = memory.device_memory_bytes or memory.kv_cache_memory_bytes
    here = settings["device"] in ("", "cpu")
    asked_bytes = device_bytes * here + memory.host_memory_bytes
    text = f"device {format_size(device_bytes)} + " if here else ""
    text += f"host {format_size(memory.host_memory_bytes)} of {format_size(total_bytes)} memory"
    if asked_bytes > total_bytes:
        return Check("budgets", "problem", text, "Lower --device-memory or --host-memory: weights need memory too.")
    if asked_bytes > total_bytes * 0.8 and not memory.device_memory_bytes:
        return Check("budgets", "note", text, "This leaves little for the model's weights.")
    return Check("budgets", "ok", text)


def check_disk(disk: str, spelled: Callable[[str], str]) -> list[Check]:
    """The cache directory: whose it is, who may read it, how much fits, and whether reads can bypass the page cache.
    ``spelled`` names settings as they were given.
    """
    if not disk:
        return [Check("disk", "ok", "off (give --disk DIR:SIZE to check a directory)")]
    try:
        directory, limit_bytes = parse_disk(disk)
    except ConfigError as error:
        return [Check("disk", "problem", spelled(str(error)), "Write it as ~/.cache/stowage:20GiB.")]
    owner = check_owner(directory)
    if owner.level == "problem":
        return [owner]
    existing = nearest_directory(directory)
    return [owner, check_free(directory, existing, limit_bytes), check_direct(existing)]


def check_protection(method: str, key_file: str) -> list[Check]:
    """Whether the key file can be used, and the package that encrypts is there. Nothing where no keys are asked for."""
    if not key_file or method not in DISK_PROTECTIONS:
        return []  # the budgets' check has said what is wrong, if anything
    from stowage.storage import key_file as keys

    try:
        keys.protection(method, Path(key_file).expanduser().absolute())
    except (ConfigError, RuntimeError) as error:
        return [Check("key file", "problem", str(error), "Do what the text says; `stowage key show FILE` lists keys.")]
    return [Check("key file", "ok", f"{key_file} can be used for {method}")]


def check_owner(directory: Path) -> Check:
    name = "cache directory"
    if not os.path.lexists(directory):
        parent = directory.parent
        while not parent.exists():
            parent = parent.parent
        if not os.access(parent, os.W_OK | os.X_OK):
            fix = f"Choose another directory, or make {parent} writable for you."
            return Check(name, "problem", f"{directory} cannot be made: {parent} is not writable", fix)
        return Check(name, "ok", f"{directory} will be made")
    found = directory.lstat()
    if stat.S_ISLNK(found.st_mode):
        return Check(name, "problem", f"{directory} is a link", f"Give the directory itself: {directory.resolve()}")
    if not stat.S_ISDIR(found.st_mode):
        return Check(name, "problem", f"{directory} is not a directory", "Choose another directory.")
    if found.st_uid != os.geteuid():
        fix = "Choose a directory of your own: a cache of another user is never read."
        return Check(name, "problem", f"{directory} belongs to user {found.st_uid}", fix)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        text = f"{directory} can be written by other users (mode {mode:04o})"
        return Check(name, "problem", text, "Choose another directory, or close this one to others.")
    if mode & 0o077 and _holds_other_things(directory):
        text = f"{directory} holds other files, and other users can read it (mode {mode:04o})"
        return Check(name, "problem", text, "Choose a new or empty directory.")
    return Check(name, "ok", f"{directory} is yours" + (", and will be closed to others" if mode & 0o077 else " alone"))


def _holds_other_things(directory: Path) -> bool:
    names = os.listdir(directory)
    return bool(names) and "lock" not in names


def check_free(directory: Path, existing: Path, limit_bytes: int) -> Check:
    held_bytes = _bytes_below(directory)
    free = free_bytes(existing)
    text = f"{format_size(free)} free, {format_size(held_bytes)} held, limit {format_size(limit_bytes)}"
    if held_bytes + free < limit_bytes:
        below = f", or set the limit below {format_size(held_bytes + free)}" if held_bytes + free else ""
        return Check("disk space", "note", text, f"Free some{below}.")
    return Check("disk space", "ok", text)


def _bytes_below(directory: Path) -> int:
    sizes = (path.lstat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
    return sum(sizes) if directory.is_dir() else 0


def check_direct(existing: Path) -> Check:
    name = "direct reads"
    if not hasattr(os, "O_DIRECT"):
        return Check(name, "note", "not offered by this system", "Reads go through the page cache; nothing to do.")
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".stowage-doctor-") as probe:
            probe.write(bytes(_DIRECT_BYTES))
            probe.flush()
            refusal = _refused_direct(probe.name)
    except OSError as error:
        if error.errno in DISK_FULL:
            return Check(name, "note", f"not tried: {existing} is full ({error.strerror})", "Free some room.")
        return Check(
            name, "problem", f"no file can be written in {existing} ({error.strerror})", "Choose another directory."
        )
    if refusal:
        fix = "Reads go through the page cache, which holds the bytes twice. Best is a local ext4 or xfs."
        return Check(name, "note", f"refused by the file system of {existing} ({refusal})", fix)
    return Check(name, "ok", f"work in {existing}")


def _refused_direct(file: str) -> str:
    """Why a file cannot be opened for direct reads; empty: it can."""
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        return str(error.strerror)
    return ""


def check_shared(settings: Settings) -> list[Check]:
    """Whether shared stores answer when they are asked for a chunk that nobody has. Changes nothing there."""
    try:
        memory = settings.memory()
        return [
            *([_check_store("valkey", memory)] if memory.valkey else []),
            *([_check_store("object", memory)] if memory.object else []),
        ]
    except ConfigError:
        return []  # the budgets' finding


def _check_store(name: str, memory: Memory) -> Check:
    """One question, which is waited for a few seconds."""
    url = shown(getattr(memory, name))
    if url.startswith("file:") and not Path(unquote(urlsplit(url).path)).is_dir():
        return Check(name, "ok", f"{url}: will be made")
    fix = "Compare the address with docs/sharing.md, and see whether this machine reaches it and may use it."
    try:
        tier = _open_store(name, memory)
    except StowageError as error:
        return Check(name, "problem", str(error), fix)
    from stowage.storage.protocol import Inquiry

    began_s = time.monotonic()
    probe = tier.probe([Inquiry([os.urandom(32)], 1)])
    while not probe.done and time.monotonic() < began_s + _SHARED_S:
        time.sleep(0.001)
    took_s, stats = time.monotonic() - began_s, tier.stats()
    tier.close(time.monotonic())
    if not probe.done or not stats["healthy"] or stats["probe_errors"]:
        return Check(name, "problem", f"{url} does not answer as it should", fix)
    return Check(name, "ok", f"{url} answers, the first time within {took_s * 1000:.0f} ms")


def _open_store(name: str, memory: Memory) -> "RemoteTier":
    if name == "valkey":
        from stowage.storage.valkey import ValkeyTier

        password = valkey_password(memory.valkey, memory.valkey_password_path)
        return ValkeyTier(memory.valkey, bytes(32), password=password)
    from stowage.storage.objects import ObjectTier

    return ObjectTier(memory.object, bytes(32))
