"""Settings: one table that flags, environment, configuration file and ``stowage config show`` all read.

Contract: ``load_settings`` merges flag > ``STOWAGE_*`` environment > ``stowage.toml`` > default, and remembers for each
value where it came from. An unknown key, or a value of the wrong kind, stops start-up; the message names the nearest
valid key. Values are only read here; whether they fit together is checked by ``Memory`` and ``SamplingParams``.

Imports only the standard library and ``stowage.config.memory``, so the command line can show settings in milliseconds.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stowage.config.addresses import PASSWORD_VARIABLE, shown
from stowage.config.memory import SIZE_FIX, Memory, shown_value, unknown_name
from stowage.errors import ConfigError

_DIGITS_MAX = 40


def _digits(text: str) -> int:
    if len(text) > _DIGITS_MAX:
        raise ConfigError(f"it has {len(text)} digits: no machine has so many of anything.")
    return int(text)


def _as_size(value: object) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"it is {value!r}, not a size. {SIZE_FIX}")
    return _digits(value) if isinstance(value, str) and value.strip().isdecimal() and value.isascii() else value


def _as_text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"it is {value!r}, not text.")
    return value


def _as_int(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
        return _digits(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"it is {value!r}, not a whole number.")
    return value


def _as_float(value: object) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, int | float | str):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise ConfigError(f"it is {shown_value(value)}, not a number.")


def _as_switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.strip().lower() in known:
        return known[value.strip().lower()]
    raise ConfigError(f"it is {value!r}; write true or false.")


def _as_seed(value: object) -> int | None:
    return None if value is None or value == "" else _as_int(value)


def _as_maybe(value: object) -> bool | None:
    """A switch that may be left to the program."""
    return None if value is None or value in ("", "auto") else _as_switch(value)


def _as_texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ConfigError(f"it is {value!r}, not text or a list of texts.")


def _as_kinds(value: object) -> dict[str, int]:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        return {name.strip(): _as_int(number) for name, _, number in pairs}
    if isinstance(value, Mapping):
        return {str(name): _as_int(number) for name, number in value.items()}
    raise ConfigError(f"it is {value!r}; write kind=tokens, for example sliding=32,recurrent=512.")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name in ``stowage.toml`` (``--name`` and ``STOWAGE_NAME`` elsewhere) and how it is read. A
    switch, whose default is true or false, has no ``metavar``.
    """

    name: str
    default: Any
    read: Callable[[object], Any]
    metavar: str
    about: str
    shown: Callable[[Any], Any] = lambda value: value
    """What of a value may be shown: all of it, unless it can hold a secret."""


_MEMORY_SETTINGS = (
    Setting("device_kv", "1GiB", _as_size, "SIZE", "KV pool that the model computes from"),
    Setting("device_memory", 0, _as_size, "SIZE", "weights, KV pool and a step's activations together; 0 = no limit"),
    Setting(
        "weights",
        "auto",
        _as_text,
        "RULES",
        "where weights lie: auto, or PATTERN=resident|mapped|prefetch|stream|experts,...",
    ),
    Setting("host", 0, _as_size, "SIZE", "host arena below the device pool; 0 = off"),
    Setting("disk", "", _as_text, "DIR:SIZE", "disk tier as DIR:SIZE; empty = off"),
    Setting(
        "disk_protection",
        "checksum",
        _as_text,
        "METHOD",
        "chunks on disk: checksum, blake3 (tamper-evident) or aes-256-gcm (encrypted)",
    ),
    Setting("disk_key_file", "", _as_text, "FILE", "keys of disk_protection; made by `stowage key new FILE`"),
    Setting("valkey", "", _as_text, "URL", "shared Valkey or Redis server, as redis://host:6379/0; empty = off", shown),
    Setting("valkey_ttl_s", 86_400.0, _as_float, "SECONDS", "how long what nobody uses stays there; 0 = for ever"),
    Setting("valkey_password_file", "", _as_text, "FILE", "its password, in the first line of a file"),
    Setting("object", "", _as_text, "URL", "shared object store, as s3://bucket/prefix; empty = off", shown),
    Setting("object_limit", 0, _as_size, "SIZE", "objects that this process keeps there; 0 = no limit"),
    Setting("probe_timeout_s", 0.5, _as_float, "SECONDS", "longest wait for a shared store to say what it has"),
    Setting("policy", "cost", _as_text, "NAME", "which chunks leave a full host arena: cost, lru, s3fifo or arc"),
    Setting("block_tokens", 16, _as_int, "N", "tokens of one block"),
    Setting("chunk_blocks", 4, _as_int, "N", "blocks of one chunk, the unit that is stored and loaded"),
    Setting("snapshot_tokens", 512, _as_int, "N", "tokens between snapshots of recurrent state"),
    Setting(
        "group_block_tokens",
        {},
        _as_kinds,
        "KIND=N,...",
        "block_tokens for a kind of group, as sliding=32,recurrent=512",
    ),
    Setting("step_tokens_max", 1024, _as_int, "N", "most tokens computed in one step"),
    Setting("sequences_max", 16, _as_int, "N", "most sequences computed at the same time"),
    Setting("load_timeout_s", 30.0, _as_float, "SECONDS", "longest wait for a load before it is recomputed"),
)
_SAMPLING_SETTINGS = (
    Setting("max_new_tokens", 128, _as_int, "N", "most tokens to generate"),
    Setting("temperature", 0.0, _as_float, "X", "0 = greedy"),
    Setting("top_k", 0, _as_int, "K", "sample among the k likeliest tokens; 0 = all"),
    Setting("top_p", 1.0, _as_float, "P", "sample among the likeliest tokens that sum to this probability"),
    Setting("min_p", 0.0, _as_float, "P", "leave out tokens below this share of the likeliest one's probability"),
    Setting("seed", None, _as_seed, "N", "seed of the sampler; unset = a new one for each request"),
    Setting("stop", (), _as_texts, "TEXT", "texts that end the answer"),
    Setting("logprobs", 0, _as_int, "N", "log-probabilities to return per token"),
)
_SERVER_SETTINGS = (
    Setting("listen", "127.0.0.1:8000", _as_text, "HOST:PORT", "where to listen; port 0 takes any that is free"),
    Setting("served_name", "", _as_text, "NAME", "the model's name for clients; empty = that of MODEL"),
    Setting("api_key_file", "", _as_text, "FILE", "API keys, one per line; with none everybody may ask"),
    Setting("body_max", "8MiB", _as_size, "SIZE", "largest body of a request"),
    Setting("prompt_tokens_max", 0, _as_int, "N", "longest prompt; 0 = what the model and the device take"),
    Setting("choices_max", 128, _as_int, "N", "most choices (prompts times n) of one request"),
    Setting("queue_max", 128, _as_int, "N", "most choices that wait; more requests are answered with 429"),
    Setting("request_timeout_s", 600.0, _as_float, "SECONDS", "longest time for one request"),
    Setting("connections_max", 1024, _as_int, "N", "most connections at the same time"),
    Setting("header_max", "16KiB", _as_size, "SIZE", "largest head of a request"),
    Setting("header_timeout_s", 10.0, _as_float, "SECONDS", "longest wait for the head of a request"),
    Setting("body_timeout_s", 30.0, _as_float, "SECONDS", "longest wait for the body of a request"),
    Setting("stall_timeout_s", 30.0, _as_float, "SECONDS", "longest wait for a client that reads nothing"),
    Setting("keep_alive_s", 75.0, _as_float, "SECONDS", "how long an idle connection stays open"),
    Setting("grace_s", 30.0, _as_float, "SECONDS", "how long running requests may go on when the server stops"),
)
SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        *_MEMORY_SETTINGS,
        Setting("dtype", "auto", _as_text, "TYPE", "type to compute in: auto, float32, bfloat16, float16"),
        Setting("device", "", _as_text, "NAME", "what the model computes on: cpu (the default), cuda, cuda:1"),
        Setting(
            "deterministic",
            False,
            _as_switch,
            "",
            "the same answer to the bit, however a prompt's state arrived and whatever is computed beside it",
        ),
        Setting("cuda_graphs", None, _as_maybe, "on|off", "replay decode steps as CUDA graphs; unset = where possible"),
        *_SAMPLING_SETTINGS,
        *_SERVER_SETTINGS,
        Setting("log_format", "text", _as_text, "STYLE", "lines on stderr about trouble: text or json"),
        Setting("log_level", "warning", _as_text, "LEVEL", "least level that is logged: debug, info, warning, error"),
    )
}

ENVIRONMENT_PREFIX = "STOWAGE_"
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
    """Every setting with its value and source. ``settings["host"]`` is the value."""

    values: Mapping[str, Value]

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def memory(self) -> Memory:
        """The budgets, checked. Raises ConfigError."""
        return Memory(**{item.name: self[item.name] for item in fields(Memory)})

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments for ``SamplingParams``."""
        return {item.name: self[item.name] for item in _SAMPLING_SETTINGS}


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str], toml_path: Path | None = None) -> Settings:
    """Merge the four sources. A flag that is ``None`` was not given. ``toml_path`` None: no file.

    Raises ConfigError for an unknown key, a value of the wrong kind, or a file that is not TOML.
    """
    values = {name: Value(setting.default, "default") for name, setting in SETTINGS.items()}
    if toml_path is not None:
        values |= _read_all(_load_toml(toml_path), str(toml_path), str)
    values |= _read_all(_from_environment(environ), "environment", lambda name: ENVIRONMENT_PREFIX + name.upper())
    given = {name: value for name, value in flags.items() if value is not None}
    values |= _read_all(given, "flag", lambda name: "--" + name.replace("_", "-"))
    return Settings(values)


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
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {error}.") from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``STOWAGE_*`` variables that are settings and not empty.

    A variable that is close to a setting's name is refused as a typing error. One that resembles none is left alone:
    Kubernetes, for example, defines STOWAGE_SERVICE_HOST beside a service called stowage.
    """
    found: dict[str, str] = {}
    known = [ENVIRONMENT_PREFIX + name.upper() for name in SETTINGS] + list(_OTHER_VARIABLES)
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if variable in known and environ[variable]:
            found[variable.removeprefix(ENVIRONMENT_PREFIX).lower()] = environ[variable]
        elif variable not in known and (near := difflib.get_close_matches(variable, known, n=1, cutoff=0.85)):
            raise ConfigError(f"The environment variable {variable} is not a setting. Did you mean {near[0]}?")
    return found


def _read_all(raw: Mapping[str, Any], source: str, spelled: Callable[[str], str]) -> dict[str, Value]:
    read: dict[str, Value] = {}
    for name, value in raw.items():
        if name not in SETTINGS:
            raise ConfigError(unknown_name(f"The setting {name!r} in {source}", name, SETTINGS))
        try:
            read[name] = Value(SETTINGS[name].read(value), source)
        except ConfigError as error:
            where = f" in {source}" if source not in ("flag", "environment") else ""
            raise ConfigError(f"The setting {spelled(name)}{where} cannot be used: {error}") from error
    return read
