"""Settings under other names: what an old name means today, and what other programs' names are called here.

Contract:

- ``RENAMED`` and ``_ELSEWHERE`` are the only tables of such names. Flags, environment, ``stowage.toml``, Python
  arguments and vLLM's extra configuration all ask here.
- An old name works for one release, and whoever uses it is told the new one. ``host`` was a size of host memory and is
  an address today: a value that reads as a size has its old meaning.

Imports only the standard library and ``stowage.errors``.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from stowage.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "device_kv": "kv_cache_memory",
    "block_tokens": "block_size",
    "group_block_tokens": "group_block_size",
    "step_tokens_max": "max_num_batched_tokens",
    "sequences_max": "max_num_seqs",
    "policy": "eviction_policy",
    "probe_timeout_s": "lookup_timeout_s",
    "served_name": "served_model_name",
    "body_max": "max_body_size",
    "header_max": "max_header_size",
    "prompt_tokens_max": "max_prompt_tokens",
    "choices_max": "max_choices",
    "queue_max": "max_queued_requests",
    "connections_max": "max_connections",
    "grace_s": "shutdown_timeout_s",
}
"""Settings whose value means the same under the new name. ``host`` and ``listen`` are in ``today``."""
_RENAMED_FLAGS: Mapping[str, str] = {
    "context": "max_model_len",
    "batch": "max_num_seqs",
    "step_tokens": "max_num_batched_tokens",
}
"""Of ``plan`` and ``simulate``: never settings."""

_DEVICE_MEMORY = "Use --device-memory SIZE, such as 20GiB: it is for weights, KV cache and activations together"
_KV = "Use --kv-cache-memory SIZE"
_HOST = "--host-memory SIZE keeps prefixes in host memory"
_PLACED = "--device-memory SIZE decides which weights fit; --weights RULES names deliveries, as 'last 8 of 32=stream'"
_LENGTH = "Use --max-model-len N"
_SEQUENCES = "Use --max-num-seqs N"
_STEP = "Use --max-num-batched-tokens N"
_ANSWER = "Use --max-new-tokens N, or -n N"
_ONE_DEVICE = (
    "One server computes on one device: start one for each, and share prefixes through --valkey URL or --object URL"
)
_KEY = "Every user of the machine can read a command line: write keys to --api-key-file FILE or STOWAGE_API_KEYS"
_MODEL = "The model is the argument MODEL, or -m MODEL"
_PREFIXES = "Prefixes are always reused; --host-memory SIZE and --disk DIR:SIZE say where they are kept"
_TIERS = "--disk DIR:SIZE, --valkey URL or --object URL keep prefixes below host memory"
_FEWER_BITS = "`stowage pack MODEL DIR --weights int8` writes a checkpoint in fewer bits"
_TLS = "Put a proxy with TLS in front of the server"
_ELSEWHERE: Mapping[str, str] = {
    name: answer
    for names, answer in {
        "gpu_memory_utilization mem_fraction_static max_memory": _DEVICE_MEMORY,
        "kv_cache_memory_bytes num_gpu_blocks_override max_total_tokens": _KV,
        "swap_space kv_offloading_size hicache_size hicache_ratio cache_ram": _HOST,
        "cpu_offload_gb n_gpu_layers gpu_layers ngl override_tensor ot cpu_moe n_cpu_moe device_map": _PLACED,
        "ctx_size c context_length max_context max_seq_len n_ctx": _LENGTH,
        "max_running_requests max_batch_size parallel np": _SEQUENCES,
        "chunked_prefill_size max_prefill_tokens batch_size ubatch_size b ub": _STEP,
        "page_size": "Use --block-size N",
        "mamba_block_size": "Use --snapshot-tokens N",
        "max_tokens predict n_predict": _ANSWER,
        "temp": "Use --temperature X",
        "random_seed": "Use --seed N",
        "file f": "Use --prompt-file FILE",
        "system_prompt sys": "Use --system TEXT",
        "model_path hf_repo hf": _MODEL,
        "alias": "Use --served-model-name NAME",
        "api_key": _KEY,
        "tensor_parallel_size tp tp_size pipeline_parallel_size pp pp_size data_parallel_size dp dp_size": _ONE_DEVICE,
        "tensor_split split_mode main_gpu": _ONE_DEVICE,
        "enable_prefix_caching no_enable_prefix_caching disable_radix_cache enable_hierarchical_cache": _PREFIXES,
        "kv_transfer_config kv_offloading_backend hicache_storage_backend slot_save_path prompt_cache": _TIERS,
        "radix_eviction_policy": "Use --eviction-policy NAME",
        "enforce_eager disable_cuda_graph": "Use --cuda-graphs off",
        "enable_deterministic_inference": "Answers are exact by default; --deterministic insists on it",
        "quantization": _FEWER_BITS,
        "trust_remote_code": "Code that comes with a checkpoint is never run",
        "download_dir": "Set HF_HOME to the directory that models are to be kept in",
        "threads": "Set OMP_NUM_THREADS to the number of threads",
        "uvicorn_log_level log_verbosity verbose v": "Use --log-level LEVEL",
        "timeout": "Use --request-timeout-s SECONDS",
        "timeout_keep_alive": "Use --keep-alive-s SECONDS",
        "timeout_graceful_shutdown shutdown_timeout": "Use --shutdown-timeout-s SECONDS",
        "limit_concurrency": "Use --max-connections N",
        "h11_max_incomplete_event_size": "Use --max-header-size SIZE",
        "ssl_keyfile ssl_certfile ssl_key_file ssl_cert_file": _TLS,
        "host": "It is the address that `stowage serve` listens on; a size of host memory is --host-memory SIZE",
        "port listen": "`stowage serve --host ADDRESS --port N` says where the server listens",
    }.items()
    for name in names.split()
}
"""Names that vLLM, SGLang, llama.cpp, uvicorn and Accelerate have for what Stowage calls otherwise, or does not do."""
_SIZE = re.compile(r"\s*[0-9]+(\.[0-9]+)?\s*([kmgt]?(i?b)?|%)\s*", re.IGNORECASE)
_Made = TypeVar("_Made")


def is_size(value: object) -> bool:
    """Whether a value reads as a size, and so cannot be meant as an address."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, str) and _SIZE.fullmatch(value) is not None
    )


def today(name: str, value: Any) -> dict[str, Any]:
    """Today's settings for one that was written under any name; ``{name: value}`` for a name that is today's."""
    if name == "host" and is_size(value):
        return {"host_memory": value}
    if name == "listen" and isinstance(value, str):
        return _address(value)
    return {RENAMED.get(name, name): value}


def flags_today(name: str, value: str) -> dict[str, str]:
    """``today`` for a flag of any command, written as a setting: ``step_tokens`` for ``--step-tokens``."""
    return {_RENAMED_FLAGS[name]: value} if name in _RENAMED_FLAGS else today(name, value)


def elsewhere(name: str) -> str:
    """A sentence without its period: what to use instead of a name that other programs have; empty for one that is not
    known here.
    """
    return _ELSEWHERE.get(name, "")


def all_today(given: Mapping[str, Any], said: Callable[[str, Iterable[str]], None]) -> dict[str, Any]:
    """``given`` under today's names. ``said`` is told of each old name, and of the new ones. Raises ConfigError where
    two names mean the same setting.
    """
    found: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in given.items():
        settings = today(name, value)
        for new in settings:
            if new in written:
                raise ConfigError(f"{written[new]} and {name} are one setting now, {new}. Give one of them.")
            written[new] = name
        found |= settings
    for name, value in given.items():
        if name not in (settings := today(name, value)):
            said(name, settings)
    return found


def renamed_hint(old: str, new: Iterable[str]) -> str:
    """The line for people who used an old name."""
    return f"{old} is called {' and '.join(new)} now; the old name goes with the next release."


def arguments_today(function: str, given: Mapping[str, Any], own: Iterable[str] | None = None) -> dict[str, Any]:
    """Keyword arguments of ``function`` under today's names, with a DeprecationWarning for each old one. ``own``: the
    names that it takes, if others are to be answered with those that they have here. Raises ConfigError.
    """

    def said(old: str, new: Iterable[str]) -> None:
        text = renamed_hint(f"{function}({old}=...)", [f"{function}({name}=...)" for name in new])
        warnings.warn(text, DeprecationWarning, stacklevel=5)

    known = {name: value for name, value in given.items() if own is None or today(name, value).keys() <= set(own)}
    others = {name: value for name, value in given.items() if name not in known}
    for name in others:
        if answer := elsewhere(name):
            raise ConfigError(f"{function} has no {name}. {answer}.")
    return others | all_today(known, said)


def with_old_names(made: type[_Made]) -> type[_Made]:
    """Let a dataclass be made, and be read, under old names too."""
    make = made.__init__
    own = {item.name for item in fields(made)}  # type: ignore[arg-type]

    @functools.wraps(make)
    def init(self: Any, *args: Any, **given: Any) -> None:
        if not own.issuperset(given):
            given = arguments_today(made.__name__, given, own)
        make(self, *args, **given)

    def read(self: Any, name: str) -> Any:
        base = name.removesuffix("_bytes")
        new = "host_memory" if base == "host" else RENAMED.get(base, "")
        if new not in own:
            raise AttributeError(f"{made.__name__!r} object has no attribute {name!r}")
        new += name[len(base) :]
        text = renamed_hint(f"{made.__name__}.{name}", [f"{made.__name__}.{new}"])
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    made.__init__ = init  # type: ignore[method-assign]
    made.__getattr__ = read  # type: ignore[attr-defined]
    return made


def _address(text: str) -> dict[str, Any]:
    """Host and port of what was one setting, ``HOST:PORT``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise ConfigError(f"listen {text!r} is not understood. Write --host ADDRESS --port N instead.")
    return {"host": host.strip("[]"), "port": port}
