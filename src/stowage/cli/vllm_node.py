"""Whether the host memory of vLLM's engines fits into this machine, and what the kernel gives for it.

Reads files of the system. The parts of a node's budget are read as a starting engine reads them.
"""

from collections.abc import Mapping
from pathlib import Path

from stowage.cli.checks import Check
from stowage.cli.vllm_flags import number
from stowage.config.memory import format_size, ram_total_bytes
from stowage.errors import StowageError
from stowage.plugins.vllm.settings import Options
from stowage.storage.lease import budget_directory, held_bytes

SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MUCH = 0.8


def check_node(options: Options, flags: Mapping[str, str], environ: Mapping[str, str]) -> list[Check]:
    """Of all engines that this command starts on this machine."""
    engines = number(flags, "data_parallel_size_local", number(flags, "data_parallel_size"))
    asked_bytes = options.memory.host_memory_bytes * engines
    pool_gib = environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    pool_bytes = (int(pool_gib) << 30) * engines if pool_gib.isdigit() else 0
    return [
        check_fits(asked_bytes, pool_bytes, engines, ram_total_bytes()),
        *check_budget(asked_bytes, engines, options),
        *check_pages(SHARED_PAGES),
    ]


def check_fits(asked_bytes: int, pool_bytes: int, engines: int, total_bytes: int) -> Check:
    """``total_bytes``: of the machine, or of the container where that is less."""
    text = f"{format_size(asked_bytes)} of {format_size(total_bytes)}"
    text += f", {engines} engines together" if engines > 1 else ""
    text += f", and {format_size(pool_bytes)} for KV caches" if pool_bytes else ""
    if asked_bytes + pool_bytes > total_bytes:
        fix = "Lower host_memory, or raise the container's memory limit: host memory counts in full once it is used."
        return Check("host memory", "problem", text, fix)
    if asked_bytes + pool_bytes > total_bytes * _MUCH:
        return Check("host memory", "note", text, "This leaves little for vLLM itself, and for other programs.")
    return Check("host memory", "ok", text)


def check_budget(asked_bytes: int, engines: int, options: Options) -> list[Check]:
    """``node_host_memory``: whether there is room for these engines beside those that run."""
    name = "node's budget"
    if not options.node_bytes:
        if engines == 1:
            return []
        fix = f'"node_host_memory": "{asked_bytes}" makes that a limit, which engines of other servers share.'
        return [Check(name, "note", f"none: {engines} engines take {format_size(asked_bytes)} together", fix)]
    try:
        held = held_bytes(budget_directory("vllm"))
    except StowageError as error:
        return [Check(name, "problem", str(error), "Do what the text says.")]
    text = f"{format_size(asked_bytes)} of {format_size(options.node_bytes)}, and others hold {format_size(held)}"
    if asked_bytes + held > options.node_bytes:
        fix = "Lower host_memory, raise node_host_memory, or end other engines: what does not fit refuses to start."
        return [Check(name, "problem", text, fix)]
    return [Check(name, "ok", text)]


def check_pages(path: Path) -> list[Check]:
    """Whether memory that processes share comes in huge pages when asked for. Nothing where the kernel does not say."""
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return []
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("never", "deny"):
        fix = f"For quicker copies: echo advise | sudo tee {path}"
        return [Check("huge pages", "note", f"{chosen}: host memory lies in small pages", fix)]
    return [Check("huge pages", "ok", f"{chosen}: host memory may lie in huge pages")]
