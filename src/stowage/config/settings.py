"""Settings: one table that flags, environment, configuration file and ``stowage config show`` all read.

Contract: ``load_settings`` merges flag > ``STOWAGE_*`` environment > ``stowage.toml`` > default, and remembers for each
value where it came from. An unknown key, or a value of the wrong kind, stops start-up; the message names the nearest
valid key. Values are only read here; whether they fit together is checked by ``Memory`` and ``SamplingParams``.

Imports only the standard library and its neighbours, so the command line can show settings in milliseconds.
"""

import difflib
import tomllib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stowage.config.addresses import PASSWORD_VARIABLE, shown
from stowage.config.memory import AUTO, COMPRESSIONS, POLICIES, Memory
from stowage.config.names import advice_for
from stowage.config.spelling import ENVIRONMENT_PREFIX, flag_of, spelled, variable_of
from stowage.config.values import (
    as_addresses,
    as_float,
    as_int,
    as_kinds,
    as_maybe,
    as_seed,
    as_size,
    as_switch,
    as_text,
    as_texts,
    as_tokens,
)
from stowage.config.wording import unknown_name
from stowage.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name in ``stowage.toml`` (``--name`` and ``STOWAGE_NAME`` elsewhere) and how it is read. A
    switch, whose default is true or false, has no ``metavar``. ``group``: its part of ``--help``; empty: the first,
    with what most people need, so that ``about`` is one short line there. ``letter``: of the short flag.
    """

    name: str
    default: Any
    read: Callable[[object], Any]
    metavar: str
    about: str
    group: str = ""
    shown: Callable[[Any], Any] = lambda value: value
    """What of a value may be shown: all of it, unless it can hold a secret."""
    letter: str = ""


_SAMPLING = "Sampling"
_CACHE = "Expert settings: cache"
_SHARED = "Expert settings: stores that machines share"
_COMPUTE = "Expert settings: computing"
SERVER_GROUP = "Expert settings: server"
LOG_GROUP = "Expert settings: log"

_POLICIES = f"{', '.join(POLICIES[:-1])} or {POLICIES[-1]}"

MEMORY_SETTINGS = (
    Setting("device_memory", 0, as_size, "SIZE", "weights, KV cache and activations; 0: no limit"),
    Setting("kv_cache_memory", AUTO, as_size, "SIZE", "KV cache of the model"),
    Setting("host_memory", AUTO, as_size, "SIZE", "prefixes in host memory; 0: off"),
    Setting("disk", "", as_text, "DIR:SIZE", "prefixes on disk, as ~/.cache/stowage:20GiB"),
    Setting("max_model_len", 0, as_tokens, "N", "longest prompt and answer; 0: what fits"),
    Setting("max_num_seqs", 16, as_int, "N", "most sequences computed at a time"),
    Setting("eviction_policy", POLICIES[0], as_text, "NAME", f"what leaves host memory: {_POLICIES}", _CACHE),
    Setting("block_size", 16, as_int, "N", "tokens of one block", _CACHE),
    Setting(
        "group_block_size",
        {},
        as_kinds,
        "KIND=N,...",
        "the same for a kind of group, as sliding=32,recurrent=512",
        _CACHE,
    ),
    Setting("chunk_blocks", 4, as_int, "N", "blocks of one chunk, the unit that is stored and loaded", _CACHE),
    Setting("snapshot_tokens", 512, as_int, "N", "tokens between snapshots of recurrent state", _CACHE),
    Setting("load_timeout_s", 30.0, as_float, "SECONDS", "longest wait for a load before it is recomputed", _CACHE),
    Setting(
        "host_packed",
        0,
        as_size,
        "SIZE",
        "how much of host memory keeps chunks packed, to the bit, in two thirds of their bytes, as 80%",
        _CACHE,
    ),
    Setting(
        "compression",
        COMPRESSIONS[0],
        as_text,
        "WHEN",
        "chunks at rest in fewer bytes, to the bit: auto (where loads get no slower), on or off",
        _CACHE,
    ),
    Setting(
        "disk_protection",
        "checksum",
        as_text,
        "METHOD",
        "chunks on disk: checksum, blake3 (tamper-evident) or aes-256-gcm (encrypted)",
        _CACHE,
    ),
    Setting("disk_key_file", "", as_text, "FILE", "keys of disk_protection, made by `stowage key new FILE`", _CACHE),
    Setting("valkey", "", as_text, "URL", "Valkey or Redis server, as redis://host:6379/0", _SHARED, shown),
    Setting("valkey_ttl_s", 86_400.0, as_float, "SECONDS", "how long it keeps what nobody uses; 0: for ever", _SHARED),
    Setting("valkey_password_file", "", as_text, "FILE", "its password, in the first line of a file", _SHARED),
    Setting("object", "", as_text, "URL", "object store, as s3://bucket/prefix", _SHARED, shown),
    Setting("object_limit", 0, as_size, "SIZE", "objects that this process keeps there; 0: no limit", _SHARED),
    Setting("lookup_timeout_s", 0.5, as_float, "SECONDS", "longest wait for a store to say what it has", _SHARED),
    Setting(
        "weights",
        "auto",
        as_text,
        "RULES",
        "where weights lie: auto, or PATTERN=resident|mapped|prefetch|stream|experts,...",
        _COMPUTE,
    ),
    Setting("max_num_batched_tokens", 1024, as_int, "N", "most tokens computed in one step", _COMPUTE),
)
SAMPLING_SETTINGS = (
    Setting("max_new_tokens", 128, as_int, "N", "most tokens to generate", letter="n"),
    Setting("temperature", 0.0, as_float, "X", "randomness of the answer; 0: greedy"),
    Setting("top_k", 0, as_int, "K", "sample among the k likeliest tokens; 0: all", _SAMPLING),
    Setting("top_p", 1.0, as_float, "P", "sample among the likeliest tokens that sum to this probability", _SAMPLING),
    Setting("min_p", 0.0, as_float, "P", "leave out tokens below this share of the likeliest one's", _SAMPLING),
    Setting("seed", None, as_seed, "N", "seed of the sampler; unset: a new one for each request", _SAMPLING),
    Setting("stop", (), as_texts, "TEXT", "a text that ends the answer; repeatable", _SAMPLING),
    Setting("logprobs", 0, as_int, "N", "log-probabilities to return per token", _SAMPLING),
)
SERVER_SETTINGS = (
    Setting("host", "127.0.0.1", as_text, "ADDRESS", "address to listen on"),
    Setting("port", 8000, as_int, "N", "port to listen on; 0: any"),
    Setting("api_key_file", "", as_text, "FILE", "API keys, one per line; none: everybody may ask"),
    Setting("served_model_name", "", as_text, "NAME", "the model's name for clients; empty: MODEL's own"),
    Setting("tool_call_parser", "auto", as_text, "NAME", "how the model writes calls, as hermes; auto", SERVER_GROUP),
    Setting("reasoning_parser", "auto", as_text, "NAME", "how it writes thoughts, as qwen3; auto; none", SERVER_GROUP),
    Setting(
        "allowed_origins",
        (),
        as_addresses,
        "ORIGIN",
        "web pages that may ask, as https://chat.example; repeatable",
        SERVER_GROUP,
    ),
    Setting("max_body_size", "8MiB", as_size, "SIZE", "largest body of a request", SERVER_GROUP),
    Setting("max_prompt_tokens", 0, as_int, "N", "longest prompt; 0: what fits", SERVER_GROUP),
    Setting("max_choices", 128, as_int, "N", "most choices (prompts times n) of one request", SERVER_GROUP),
    Setting(
        "max_queued_requests",
        128,
        as_int,
        "N",
        "most requests that wait (each choice of one counts); more are answered with 429",
        SERVER_GROUP,
    ),
    Setting("request_timeout_s", 600.0, as_float, "SECONDS", "longest time for one request", SERVER_GROUP),
    Setting("max_connections", 1024, as_int, "N", "most connections at the same time", SERVER_GROUP),
    Setting("request_memory", "256MiB", as_size, "SIZE", "bodies, their reading, answers not sent yet", SERVER_GROUP),
    Setting(
        "reading_timeout_s",
        30.0,
        as_float,
        "SECONDS",
        "processor time for one client's long prompts, of each minute",
        SERVER_GROUP,
    ),
    Setting("max_header_size", "16KiB", as_size, "SIZE", "largest head of a request", SERVER_GROUP),
    Setting("header_timeout_s", 10.0, as_float, "SECONDS", "longest wait for the head of a request", SERVER_GROUP),
    Setting("body_timeout_s", 30.0, as_float, "SECONDS", "longest wait for the body of a request", SERVER_GROUP),
    Setting("stall_timeout_s", 30.0, as_float, "SECONDS", "longest wait for a client that reads nothing", SERVER_GROUP),
    Setting("keep_alive_s", 75.0, as_float, "SECONDS", "how long an idle connection stays open", SERVER_GROUP),
    Setting("shutdown_timeout_s", 30.0, as_float, "SECONDS", "how long requests may go on at the end", SERVER_GROUP),
    Setting("max_reopens", 0, as_int, "N", "times that an engine which failed is opened again", SERVER_GROUP),
)


def _compute_switch(name: str, about: str) -> Setting:
    return Setting(name, False, as_switch, "", about, _COMPUTE)


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        *MEMORY_SETTINGS,
        Setting("device", "", as_text, "NAME", "what computes: cpu (the default), cuda, cuda:1"),
        Setting("dtype", "auto", as_text, "TYPE", "float32, bfloat16 or float16"),
        _compute_switch(
            "deterministic",
            "do not start where answers cannot be exact: the same to the bit from every tier and in every batch",
        ),
        _compute_switch(
            "batch_dependent", "let the last bits of answers depend on tiers and on what is computed beside them"
        ),
        _compute_switch(
            "int8_activations",
            "round activations to 8 bits for integer weights: quicker, and not the published weights' answers",
        ),
        Setting(
            "cuda_graphs", None, as_maybe, "on|off", "replay decode steps as CUDA graphs; unset: if possible", _COMPUTE
        ),
        *SAMPLING_SETTINGS,
        *SERVER_SETTINGS,
        Setting("log_format", "text", as_text, "STYLE", "lines on stderr about trouble: text or json", LOG_GROUP),
        Setting("log_level", "warning", as_text, "LEVEL", "least level: debug, info, warning, error", LOG_GROUP),
    )
}

_OTHER_VARIABLES = (
    "STOWAGE_API_KEYS",
    "STOWAGE_CONFIG",
    "STOWAGE_DEBUG",
    "STOWAGE_DISABLE_PIN_MEMORY",
    "STOWAGE_PURE_PYTHON",
    "STOWAGE_TORCH_ATTENTION",
    PASSWORD_VARIABLE,
)


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value, and where it came from: ``default``, ``flag``, ``environment`` or the file's path."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting with its value (``settings["disk"]``) and source. ``flags``: asked for as flags, given or not."""

    values: Mapping[str, Value]
    flags: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def memory(self) -> Memory:
        """The budgets, checked. Raises ConfigError."""
        return Memory(**{item.name: self[item.name] for item in fields(Memory)})

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments for ``SamplingParams``."""
        return {item.name: self[item.name] for item in SAMPLING_SETTINGS}

    def spelled(self, text: str, besides: Container[str] = ()) -> str:
        """A message with each setting but those named as it was given; a default as it could have been."""
        named = {name: value.source for name, value in self.values.items() if name not in besides}
        return spelled(text, {name: self._spelling(name, source) for name, source in named.items()})

    def _spelling(self, name: str, source: str) -> str:
        if source == "flag" or (source == "default" and name in self.flags):
            return flag_of(name)
        return variable_of(name) if source in ("default", "environment") else f"{name} in {source}"


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str], toml_path: Path | None = None) -> Settings:
    """Merge the four sources. A flag that is ``None`` was not given. ``toml_path`` None: no file.

    Raises ConfigError for an unknown key, a value of the wrong kind, or a file that is not TOML.
    """
    values = {name: Value(setting.default, "default") for name, setting in SETTINGS.items()}
    if toml_path is not None:
        values |= _read_all(_load_toml(toml_path), str(toml_path), str)
    variables = _from_environment(environ)
    values |= _read_all(variables, "environment", variable_of)
    given = {name: value for name, value in flags.items() if value is not None}
    values |= _read_all(given, "flag", flag_of)
    return Settings(values, frozenset(flags))


def find_config(environ: Mapping[str, str], directory: Path | None = None) -> Path | None:
    """The file to read: ``$STOWAGE_CONFIG``, else ``stowage.toml`` in ``directory`` (the current one), else none."""
    named = environ.get("STOWAGE_CONFIG", "")
    if named:
        return Path(named).expanduser()
    here = (directory or Path.cwd()) / "stowage.toml"
    return here if here.is_file() else None


def _load_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {error.strerror}. Give a file "
            "such as ./stowage.toml, or leave --config and STOWAGE_CONFIG out."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {error}.") from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``STOWAGE_*`` variables that are settings and not empty.

    A variable that is close to a setting's name is refused as a typing error. One that resembles none is left alone:
    Kubernetes, for example, defines STOWAGE_SERVICE_HOST beside a service called stowage, and STOWAGE_PORT, which is no
    port but ``tcp://...``.
    """
    found: dict[str, str] = {}
    known = [variable_of(name) for name in SETTINGS] + list(_OTHER_VARIABLES)
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if variable == "STOWAGE_PORT" and "://" in environ[variable]:
            continue
        if variable in known and environ[variable]:
            found[variable.removeprefix(ENVIRONMENT_PREFIX).lower()] = environ[variable]
        elif variable not in known and (near := difflib.get_close_matches(variable, known, n=1, cutoff=0.85)):
            raise ConfigError(f"The environment variable {variable} is not a setting. Did you mean {near[0]}?")
    return found


def _read_all(raw: Mapping[str, Any], source: str, spelled: Callable[[str], str]) -> dict[str, Value]:
    read: dict[str, Value] = {}
    where = f" in {source}" if source not in ("flag", "environment") else ""
    for name, value in raw.items():
        if name not in SETTINGS and isinstance(value, Mapping):
            raise ConfigError(f"There is a table [{name}]{where}, and settings are in none: leave that line out.")
        if name not in SETTINGS and (answer := advice_for(name)):
            raise ConfigError(f"{spelled(name)}{where} is no setting. {answer}.")
        if name not in SETTINGS:
            raise ConfigError(unknown_name(f"The setting {name!r} in {source}", name, SETTINGS))
        try:
            read[name] = Value(SETTINGS[name].read(value), source)
        except ConfigError as error:
            raise ConfigError(f"The setting {spelled(name)}{where} cannot be used: {error}") from error
    return read
