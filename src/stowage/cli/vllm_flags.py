"""The flags of ``vllm serve``, as ``stowage doctor --vllm-args`` reads them, and what in them does not go together with
StowageConnector. Reads text and nothing else.
"""

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from stowage.cli.checks import Check
from stowage.config.spelling import flag_of
from stowage.errors import ConfigError
from stowage.plugins.vllm.adapter import READ_FROM_FILES
from stowage.plugins.vllm.settings import Options, read

NAME = "StowageConnector"
_TRANSFER = "kv_transfer_config"
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpl": "data_parallel_size_local",
    "-sc": "speculative_config",
}
_FLAGS, _SETTINGS = "vLLM's flags", "settings"
_SETTINGS_FIX = "Change the setting that is named; docs/vllm.md lists all of them."


def read_flags(text: str) -> dict[str, str]:
    """Values by name, ``_`` for ``-``. A switch is "true", ``--no-`` "false". Raises ConfigError for an open quote."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"--vllm-args is not understood ({error}). Write it in one pair of quotes, and JSON in the other kind."
        ) from error
    found: dict[str, str] = {}
    for word, following in itertools.pairwise([*words, ""]):
        if not word.startswith("-"):
            continue
        flag, equals, value = word.partition("=")
        name = _SHORT.get(flag, flag.lstrip("-").replace("-", "_"))
        if not equals and following and not following.startswith("-"):
            found[name] = following
        elif not equals and name.startswith("no_"):
            found[name.removeprefix("no_")] = "false"
        else:
            found[name] = value if equals else "true"
    return found


def number(flags: Mapping[str, str], name: str, default: int = 1) -> int:
    """The whole number that a flag has; vLLM itself says what is wrong with others."""
    text = flags.get(name, "")
    return int(text) if text.isdigit() else default


def read_transfer(flags: Mapping[str, str]) -> dict[str, Any] | None:
    """What ``--kv-transfer-config`` says; ``None`` where it is not there. Raises ``ConfigError``."""
    dotted = {name.partition(".")[2]: value for name, value in flags.items() if name.startswith(f"{_TRANSFER}.")}
    if dotted:
        return _nested(dotted)
    if _TRANSFER not in flags:
        return None
    try:
        transfer = json.loads(flags[_TRANSFER])
    except ValueError as error:
        raise ConfigError(
            f"--kv-transfer-config is no JSON ({error}). Write it in single quotes, with double quotes inside."
        ) from error
    if not isinstance(transfer, dict):
        raise ConfigError('--kv-transfer-config must be an object: {"kv_connector": ...}.')
    return transfer


def _nested(dotted: Mapping[str, str]) -> dict[str, Any]:
    """``--kv-transfer-config.kv_connector_extra_config.host_memory 8GiB``, which vLLM takes too."""
    result: dict[str, Any] = {}
    for path, text in dotted.items():
        *parents, last = path.split(".")
        inner = result
        for parent in parents:
            inner = inner.setdefault(parent, {})
        try:
            inner[last] = json.loads(text)
        except ValueError:
            inner[last] = text
    return result


def connectors(transfer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The connector, and the children of a ``MultiConnector``, in their order."""
    yield transfer
    for child in extra_of(transfer).get("connectors") or ():
        if isinstance(child, dict):
            yield from connectors(child)


def extra_of(transfer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The connector's own settings; empty where they are no mapping."""
    extra = transfer.get("kv_connector_extra_config") or {}
    return extra if isinstance(extra, dict) else {}


def options_of(transfer: Mapping[str, Any]) -> Options | None:
    """What the one StowageConnector is to do; ``None`` where ``check_transfer`` has something to say of it."""
    ours = [one for one in connectors(transfer) if one.get("kv_connector") == NAME]
    try:
        return read(extra_of(ours[0])) if len(ours) == 1 else None
    except ConfigError:
        return None


def check_transfer(transfer: Mapping[str, Any], *, registered: bool) -> list[Check]:
    """``--kv-transfer-config``. ``registered``: vLLM finds the connector by its name."""
    every = list(connectors(transfer))
    ours = [one for one in every if one.get("kv_connector") == NAME]
    if len(ours) != 1:
        found = ", ".join(str(one.get("kv_connector")) for one in every)
        if ours:
            fix = "Keep one: each has host memory of its own."
            return [Check(_SETTINGS, "problem", f"several {NAME}s: {found}", fix)]
        fix = f'Name "kv_connector": "{NAME}", or have it among the "connectors" of a MultiConnector.'
        return [Check(_SETTINGS, "problem", f"no {NAME}: {found}", fix)]
    checks = [_check_role(one) for one in every if one.get("kv_role") not in _ROLES]
    if not registered and not ours[0].get("kv_connector_module_path"):
        fix = 'Add "kv_connector_module_path": "stowage.plugins.vllm" beside "kv_connector".'
        checks.append(Check(_SETTINGS, "problem", f"vLLM does not find {NAME} by its name here", fix))
    try:
        options = read(extra_of(ours[0]))
    except ConfigError as error:
        return [*checks, Check(_SETTINGS, "problem", str(error), _SETTINGS_FIX)]
    below = [name for name in ("disk", "valkey", "object") if getattr(options.memory, name)]
    text = f"understood; host memory and {', '.join(below) or 'nothing'} below it"
    return [*checks, Check(_SETTINGS, "ok", text), *_check_neighbours(transfer, ours[0])]


def _check_role(one: Mapping[str, Any]) -> Check:
    text = f"kv_role of {one.get('kv_connector')} is {one.get('kv_role')!r}"
    return Check(_SETTINGS, "problem", text, f"Set it to one of {', '.join(_ROLES)}.")


def _check_neighbours(transfer: Mapping[str, Any], ours: Mapping[str, Any]) -> list[Check]:
    if transfer is ours:
        return []
    parents = [one for one in connectors(transfer) if extra_of(one).get("connectors")]
    misplaced = [name for one in parents for name in extra_of(one) if name != "connectors"]
    if misplaced:
        text = f'{", ".join(misplaced)} beside "connectors", where nothing reads it'
        fix = f"Move it into the kv_connector_extra_config of {NAME}."
        return [Check("other connectors", "problem", text, fix)]
    names = [str(one.get("kv_connector")) for one in connectors(transfer) if one not in parents]
    if transfer.get("kv_role") == "kv_consumer" and names[0] == NAME and len(names) > 1:
        fix = f"Put {names[1]} first, so that what was just computed elsewhere is not looked for in slower tiers."
        return [Check("other connectors", "note", f"a decoder asks {NAME} first", fix)]
    text = f"{', '.join(names)}: a prompt is loaded by the first that has it; a failed copy of Stowage's is computed"
    return [Check("other connectors", "ok", text)]


def check_flags(flags: Mapping[str, str], *, recurrent: bool) -> list[Check]:
    """Flags with which the connector refuses to start, or does less than one would think."""
    checks = []
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if number(flags, name) > 1:
            checks.append(_refused(f"{flag_of(name)} is {flags[name]}", f"Leave {flag_of(name)} out."))
    if _is_on(flags, "enable_sleep_mode"):
        checks.append(_refused("sleep mode does not go with the connector", "Leave --enable-sleep-mode out."))
    if "extract_hidden_states" in flags.get("speculative_config", ""):
        fix = "Choose another method of --speculative-config, or leave the connector out."
        checks.append(_refused("extract_hidden_states keeps what is no KV cache in it", fix))
    if "ray" in flags.get("distributed_executor_backend", "") or number(flags, "nnodes") > 1:
        fix = "Run one engine per machine (--data-parallel-size, or a router), and share through --valkey or --object."
        checks.append(Check(_FLAGS, "note", "workers on other machines than the scheduler's are refused", fix))
    if recurrent and (_is_off(flags, "enable_prefix_caching") or flags.get("mamba_cache_mode") == "none"):
        fix = "Start with --enable-prefix-caching --mamba-cache-mode align."
        checks.append(_refused("recurrent layers need vLLM's prefix caching: without it no state is kept", fix))
    if flags.get("load_format") == "dummy":
        fix = "Nothing to do for a trial; otherwise leave --load-format out."
        checks.append(Check(_FLAGS, "note", "random weights: what is stored serves that process alone", fix))
    elif flags.get("load_format", "auto") not in READ_FROM_FILES or flags.get("model_weights"):
        fix = "Load from a directory or the hub where later processes shall find what was stored."
        checks.append(Check(_FLAGS, "note", "weights that are no files of the model serve that process alone", fix))
    if any(name in flags.get("pooler_config", "") for name in ("MEAN", "CLS", "STEP")):
        fix = "Leave the connector out."
        checks.append(_refused("pooling of all of a prompt's hidden states leaves nothing to load", fix))
    if _is_on(flags, "disable_log_stats"):
        checks.append(Check(_FLAGS, "note", "no metrics, Stowage's neither", "Leave --disable-log-stats out."))
    for name in ("prefix_caching_hash_algo", "enable_prefix_caching"):
        if name in flags and not recurrent:
            checks.append(Check(_FLAGS, "ok", f"{flag_of(name)} does not matter: chunks are named by their tokens"))
    return checks or [Check(_FLAGS, "ok", "none that the connector minds")]


def _refused(found: str, fix: str) -> Check:
    return Check(_FLAGS, "problem", found, fix)


def _is_on(flags: Mapping[str, str], name: str) -> bool:
    return flags.get(name, "false").lower() not in ("false", "0")


def _is_off(flags: Mapping[str, str], name: str) -> bool:
    return name in flags and not _is_on(flags, name)
