"""Names that vLLM, SGLang and llama.cpp have for settings: an error says which setting to use here.

Contract: ``_ELSEWHERE`` is the only table of such names. Flags, environment, ``stowage.toml`` and ``Memory`` all ask
here, and refuse them with the answer.

Imports only the standard library and ``stowage.errors``.
"""

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from stowage.errors import ConfigError

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
        "ctx_size c context context_length max_context max_seq_len n_ctx": _LENGTH,
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
_Made = TypeVar("_Made")


def advice_for(name: str) -> str:
    """A sentence without period: what to use instead of a name that other programs have; empty: not known here."""
    return _ELSEWHERE.get(name, "")


def refuses_other_names(made: type[_Made]) -> type[_Made]:
    """Let a dataclass refuse other programs' names with those that it has. Raises ConfigError where it is made."""
    make = made.__init__
    own = {item.name for item in fields(made)}  # type: ignore[arg-type]

    @functools.wraps(make)
    def init(self: Any, *args: Any, **given: Any) -> None:
        for name in given.keys() - own:
            if answer := advice_for(name):
                raise ConfigError(f"{made.__name__} has no {name}. {answer}.")
        make(self, *args, **given)

    made.__init__ = init  # type: ignore[method-assign]
    return made
