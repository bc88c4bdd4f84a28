"""Memory budgets: what they are, and how sizes are written.

Contract:

- ``Memory`` is the frozen statement of every memory budget. It is checked when it is made: a ``Memory`` that exists
  can be used. Sizes stay as the user wrote them; the ``*_bytes`` properties give numbers.
- ``parse_size``, ``parse_disk`` and ``parse_tokens`` are the only readers of sizes. They are exact (no floating point)
  and refuse what they do not understand.

Imports only the standard library, ``errors``, ``addresses``, ``arguments``, ``names`` and ``wording``. Which source
a setting comes from is ``config/settings.py``'s job.
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from pathlib import Path

from stowage.config import arguments
from stowage.config.addresses import parse_object, parse_valkey, shown
from stowage.config.names import refuses_other_names
from stowage.config.wording import shown_value, unknown_name
from stowage.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*|%)", re.IGNORECASE)
_SIZE_BYTES_MAX = 1 << 62
_SIZE_CHARACTERS_MAX = 64
SIZE_FIX = "Write a number of bytes, or a number with a unit such as 512MB, 2GiB or 30%."
_COUNT_MAX = (1 << 31) - 1
RULES_MAX = 1 << 16
"""Characters of rules for weights."""
_TEXTS = (
    "disk compression disk_protection disk_key_file valkey valkey_password_file object eviction_policy weights".split()
)
_GROUP_KINDS = ("full", "sliding", "chunked", "recurrent")
AUTO = "auto"
"""A size that Stowage chooses."""
KV_AUTO_BYTES, KV_AUTO_PART = 1 << 30, 4
"""Of the KV pool that ``auto`` sets aside: at most, and of device memory the part that it is then."""
_HOST_AUTO_BYTES_MAX = 4 << 30
POLICIES = ("cost", "lru", "s3fifo", "arc")
"""Of eviction, the default first; ``cache.policy`` makes them."""
DISK_PROTECTIONS = ("checksum", "blake3", "aes-256-gcm")
COMPRESSIONS = ("auto", "off", "on")


def parse_size(text: int | str, total_bytes: int | None = None) -> int:
    """Bytes meant by ``text``: ``1024``, ``"512MB"`` (decimal), ``"2GiB"`` or ``"2G"`` (binary), ``"30%"``.

    ``total_bytes`` is what a percentage is taken of; without it a percentage is refused. Fractions of a byte are
    dropped. Raises ConfigError for everything else, negative numbers included.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ConfigError(f"The size {text!r} is a {type(text).__name__}, not a number or text. {SIZE_FIX}")
    if isinstance(text, int):
        return _bounded(text, str(text) if abs(text) <= _SIZE_BYTES_MAX else "given")
    if len(text) > _SIZE_CHARACTERS_MAX:
        raise ConfigError(f"The size {text[:20]!r}... has {len(text)} characters. {SIZE_FIX}")
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"The size {text!r} is not understood. {SIZE_FIX}")
    number, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        return _share(number, text, total_bytes)
    if unit not in _UNITS:
        raise ConfigError(
            f"The unit of the size {text!r} is unknown: it must be B, KB, MB, GB, TB, KiB, ..., TiB or %."
        )
    return _bounded(int(number * _UNITS[unit]), text)


def _bounded(size_bytes: int, text: str) -> int:
    if size_bytes < 0:
        raise ConfigError(f"The size {text} is negative. {SIZE_FIX}")
    if size_bytes > _SIZE_BYTES_MAX:
        raise ConfigError(f"The size {text} is larger than any machine has (the limit is {_SIZE_BYTES_MAX} bytes).")
    return size_bytes


def _share(percent: Fraction, text: str, total_bytes: int | None) -> int:
    if percent > 100:
        raise ConfigError(f"The size {text!r} is more than everything there is. Write at most 100%.")
    if total_bytes is None:
        raise ConfigError(f"The size {text!r} is a percentage, and there is nothing here to take it of. Write bytes.")
    return int(percent * total_bytes / 100)


def parse_tokens(text: str) -> int:
    """A number of tokens: ``4096``, ``32k`` (1,024 each), ``1m``. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+)([kKmM]?)", text.strip())
    if match is None or not int(match[1]):
        raise ConfigError(f"The number of tokens {text!r} is not understood. Write 4096, 32k or 1m.")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024 * 1024}[match[2].lower()]


def format_size(size_bytes: int) -> str:
    """Short text for people: ``"1.5 GiB"``. Not meant to be parsed again (it rounds)."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value == int(value) else f"{value:.1f} {units[0]}"


def parse_disk(text: str) -> tuple[Path, int]:
    """Directory and byte limit meant by ``"DIR:SIZE"``, for example ``"~/.cache/stowage:20GiB"``.

    The last colon separates, so the directory may contain colons. ``~`` is expanded and a relative directory is taken
    from the current one. Links are not resolved: the disk tier refuses them. A percentage is taken of the file
    system that the directory is on, or will be on. Raises ConfigError.
    """
    directory_text, colon, size_text = text.rpartition(":")
    if not colon or not directory_text or "\0" in text:
        raise ConfigError(
            f"The disk {text!r} is not understood. Write DIRECTORY:SIZE, for example ~/.cache/stowage:20GiB."
        )
    directory = _expanded("disk", directory_text)
    try:
        limit_bytes = parse_size(size_text, disk_total_bytes(directory) if size_text.strip().endswith("%") else None)
    except ConfigError as error:
        raise ConfigError(f"The limit of the disk {text!r} cannot be used. {error}") from error
    if limit_bytes == 0:
        raise ConfigError(f"The disk {text!r} may hold nothing. Give it a size above zero, or leave disk out.")
    return directory, limit_bytes


def _expanded(name: str, text: str) -> Path:
    """The full path, `~` expanded. Links are not resolved."""
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError as error:
        raise ConfigError(f"The home directory in the {name} {text!r} is not known. Write the full path.") from error


def nearest_directory(path: Path) -> Path:
    """``path``, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def disk_total_bytes(directory: Path) -> int:
    """Size of the file system that holds ``directory``, or its nearest parent that exists."""
    try:
        return shutil.disk_usage(nearest_directory(directory)).total
    except OSError as error:
        raise ConfigError(
            f"The size of the file system of {directory} cannot be read: {error}. Write bytes."
        ) from error


def ram_total_bytes() -> int:
    """Bytes of memory of this machine, or of its control group where that is less."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if limit.isdigit():
            total_bytes = min(total_bytes, int(limit))
    return total_bytes


@refuses_other_names
@dataclass(frozen=True, slots=True)
class Memory:
    """The memory budgets of one engine. Sizes are bytes, or text for ``parse_size``; percentages are of RAM.

    device_memory: weights, KV cache and what a step computes with, together; 0: the weights take what they need.
    kv_cache_memory: the pool that the model computes from; ``auto`` is 1 GiB, or what the weights leave of
    device_memory. weights: what of them lies where, ``auto`` or rules such as ``model.layers.*=stream`` (see
    ``stowage.weights.placement``); in host memory they share ``host_memory`` with the arena. host_memory: the arena
    below the pool, 0 switches it off; ``auto`` is 0, or an eighth of RAM (4 GiB at most) where there is something below
    it, since chunks pass through it. host_packed: how much of host_memory keeps chunks packed, to the bit, in two
    thirds of their bytes: a size, or a percentage of it. disk: ``"DIR:SIZE"``, empty switches it off. compression: of
    chunks at rest, to the bit: auto (where it slows down neither loads nor stores), on, off. disk_protection: what
    chunks at rest, on disk and in shared stores, are sealed with (checksum, blake3, aes-256-gcm); all but a checksum
    need the keys of disk_key_file, which is not opened here. valkey, object: addresses of stores that machines share,
    empty switches them off (see ``stowage.config.addresses``). object_limit: bytes of objects that this process keeps
    there, 0 means no limit. valkey_ttl_s: how long what nobody uses stays there, 0 means for ever. lookup_timeout_s:
    the longest wait for a shared store to say what it has. max_model_len: the longest sequence, prompt and answer, no
    longer than the model's own; 0: what the model and the memory take. block_size: tokens of a block; group_block_size
    overrides it for a kind of group (full, sliding, chunked, recurrent). eviction_policy: which chunks leave the host
    arena when it is full (cost, lru, s3fifo, arc). snapshot_tokens: distance between snapshots of recurrent state.
    Raises ConfigError for what cannot be used.
    """

    kv_cache_memory: int | str = AUTO
    host_memory: int | str = AUTO
    disk: str = ""
    block_size: int = 16
    chunk_blocks: int = 4
    snapshot_tokens: int = 512
    group_block_size: Mapping[str, int] = field(default_factory=dict, hash=False)
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 16
    load_timeout_s: float = 30.0
    compression: str = COMPRESSIONS[0]
    disk_protection: str = "checksum"
    disk_key_file: str = ""
    valkey: str = field(default="", repr=False)
    valkey_ttl_s: float = 86_400.0
    valkey_password_file: str = ""
    object: str = ""
    object_limit: int | str = 0
    lookup_timeout_s: float = 0.5
    host_packed: int | str = 0
    eviction_policy: str = POLICIES[0]
    device_memory: int | str = 0
    weights: str = "auto"
    max_model_len: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        if self.kv_cache_memory_bytes == 0:
            raise ConfigError(
                "kv_cache_memory is 0: the model has no memory to compute from. Give it a size, such as 1GiB."
            )
        if 0 < self.device_memory_bytes <= self.kv_cache_memory_bytes:
            raise ConfigError(
                f"device_memory is {self.device_memory}, and the KV pool alone (kv_cache_memory) takes "
                f"{self.kv_cache_memory} of it. Give device_memory a larger size, or leave kv_cache_memory out."
            )
        host_bytes = self.host_memory_bytes
        if self.disk and host_bytes == 0:
            raise ConfigError(
                "disk is set but host_memory is 0. Chunks reach the disk through host memory: give it a size, such as "
                "256MiB, or leave host_memory out."
            )
        if self.disk:
            parse_disk(self.disk)
        if self.host_packed_bytes >= host_bytes and _plain_size("host_packed", self.host_packed, _HOST_AUTO_BYTES_MAX):
            raise ConfigError(
                f"host_packed is {self.host_packed}, and host_memory {self.host_memory}. Chunks are unpacked into the "
                "rest of host memory: leave room there for the longest prompt, as with host_packed 80%."
            )
        self._check_shared(host_bytes)
        _check_protection(self.disk_protection, self.disk_key_file)
        for name, valid in (("eviction_policy", POLICIES), ("compression", COMPRESSIONS)):
            if (value := getattr(self, name)) not in valid:
                raise ConfigError(unknown_name(f"The {name} {value!r}", value, valid))
        for name in ("block_size", "chunk_blocks", "snapshot_tokens", "max_num_batched_tokens", "max_num_seqs"):
            _positive_int(name, getattr(self, name))
        if self.chunk_blocks > 64:
            raise ConfigError(f"chunk_blocks is {self.chunk_blocks}: a chunk holds at most 64 blocks.")
        for kind, tokens in self.group_block_size.items():
            if not isinstance(kind, str):
                raise ConfigError(f"group_block_size holds {shown_value(kind)}: kinds of groups are text.")
            if kind not in _GROUP_KINDS:
                raise ConfigError(unknown_name(f"The kind of group {kind!r} in group_block_size", kind, _GROUP_KINDS))
            _positive_int(f"group_block_size[{kind}]", tokens)
        if self.max_model_len != 0:
            _positive_int("max_model_len", self.max_model_len)
        if not 0 < self.load_timeout_s < float("inf"):
            raise ConfigError(
                f"load_timeout_s is {self.load_timeout_s}: it must be a finite number of seconds above 0."
            )

    def _check_types(self) -> None:
        for name in _TEXTS:
            arguments.text(name, getattr(self, name), RULES_MAX if name == "weights" else arguments.TEXT_MAX)
        for name in ("load_timeout_s", "valkey_ttl_s", "lookup_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ConfigError(f"{name} is {shown_value(value)}: it must be a number of seconds.")
        for name in ("kv_cache_memory", "host_memory", "host_packed", "device_memory", "object_limit"):
            if not isinstance(getattr(self, name), int | str):
                raise ConfigError(f"{name} is {shown_value(getattr(self, name))}: it must be a size. {SIZE_FIX}")
        if isinstance(self.max_model_len, bool) or not isinstance(self.max_model_len, int):
            raise ConfigError(f"max_model_len is {shown_value(self.max_model_len)}: it must be a whole number.")
        if not isinstance(sizes := self.group_block_size, Mapping):
            raise ConfigError(f"group_block_size is {shown_value(sizes)}: it must map kinds of groups to tokens.")

    def _check_shared(self, host_bytes: int) -> None:
        for name, url in (("valkey", self.valkey), ("object", self.object)):
            if url and host_bytes == 0:
                raise ConfigError(
                    f"{name} is set but host_memory is 0. Chunks reach it through host memory: give it a size, such as "
                    "256MiB, or leave host_memory out."
                )
        if self.object:
            parse_object(self.object)
        _ = self.object_limit_bytes, self.valkey_password_path
        if self.valkey and parse_valkey(self.valkey).password and self.valkey_password_file:
            raise ConfigError(
                f"valkey_password_file is set, and valkey {shown(self.valkey)!r} has a password already. Keep one."
            )
        for name in ("valkey_password_file", "object_limit"):
            owner = name.partition("_")[0]
            if getattr(self, name) and not getattr(self, owner):
                raise ConfigError(f"{name} is set, and {owner} is not: it would have no effect.")
        for name in ("valkey_ttl_s", "lookup_timeout_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be a finite number of seconds, 0 or more.")

    @property
    def kv_cache_memory_bytes(self) -> int:
        """With ``auto`` and a budget for the device: what is set aside for it before weights are placed."""
        if self.kv_cache_memory == AUTO:
            device_bytes = self.device_memory_bytes
            return min(KV_AUTO_BYTES, max(1, device_bytes // KV_AUTO_PART)) if device_bytes else KV_AUTO_BYTES
        return _size_of("kv_cache_memory", self.kv_cache_memory)

    @property
    def device_memory_bytes(self) -> int:
        return _size_of("device_memory", self.device_memory)

    @property
    def places_weights(self) -> bool:
        """Whether weights have a budget, or rules of their own."""
        return bool(self.device_memory_bytes) or self.weights.strip() not in ("", "auto")

    @property
    def host_memory_bytes(self) -> int:
        if self.host_memory == AUTO:
            below = self.disk or self.valkey or self.object
            return min(_HOST_AUTO_BYTES_MAX, ram_total_bytes() // 8) if below else 0
        return _size_of("host_memory", self.host_memory)

    @property
    def host_packed_bytes(self) -> int:
        return _plain_size("host_packed", self.host_packed, self.host_memory_bytes)

    @property
    def arena_bytes(self) -> int:
        """Host memory for chunks as the model computes them."""
        return self.host_memory_bytes - self.host_packed_bytes

    @property
    def disk_directory(self) -> Path | None:
        return parse_disk(self.disk)[0] if self.disk else None

    @property
    def disk_bytes(self) -> int:
        return parse_disk(self.disk)[1] if self.disk else 0

    @property
    def object_limit_bytes(self) -> int:
        return _plain_size("object_limit", self.object_limit)

    @property
    def valkey_password_path(self) -> Path | None:
        return _expanded("valkey_password_file", self.valkey_password_file) if self.valkey_password_file else None

    @property
    def disk_key_path(self) -> Path | None:
        return _expanded("disk_key_file", self.disk_key_file) if self.disk_key_file else None


def _size_of(name: str, size: int | str) -> int:
    return _plain_size(name, size, ram_total_bytes())


def _plain_size(name: str, size: int | str, total_bytes: int | None = None) -> int:
    try:
        return parse_size(size, total_bytes)
    except ConfigError as error:
        raise ConfigError(f"{name} cannot be used. {error}") from error


def _check_protection(protection: str, key_file: str) -> None:
    """Both or neither: an option that has no effect must not look as if it had."""
    if protection not in DISK_PROTECTIONS:
        raise ConfigError(unknown_name(f"The disk_protection {protection!r}", protection, DISK_PROTECTIONS))
    if protection == "checksum" and key_file:
        raise ConfigError(
            f"disk_key_file is set to {key_file!r}, but disk_protection is checksum, which uses no key. "
            f"Set disk_protection to aes-256-gcm (encrypted) or blake3 (tamper-evident), or leave disk_key_file out."
        )
    if protection != "checksum" and not key_file:
        raise ConfigError(
            f"disk_protection is {protection}, which needs a key. Make one with `stowage key new FILE`, and set "
            f"disk_key_file to that file."
        )
    if key_file:
        _expanded("disk_key_file", key_file)


def _positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _COUNT_MAX:
        raise ConfigError(f"{name} is {shown_value(value)}: it must be a whole number of 1 or more.")
