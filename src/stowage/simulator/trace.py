"""A trace of prompts, read from a file of JSON lines and checked line by line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`timestamp` in milliseconds, lengths in tokens. `hash_ids` name the blocks of the prompt, `block_tokens` tokens each; an
id stands for the block and all that comes before it, and the last one may be of a block that is only partly filled.

A trace is columns, not objects: a million prompts take some hundred bytes each. An invalid line raises a ConfigError
with its number.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import IntArray
from stowage.errors import ConfigError

Progress = Callable[[int, int], None]

_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_TOKENS_MAX: Final = 1 << 40
_TIME_MS_MAX: Final = 1e15
"""Larger ones would be further apart than doubles can tell; those since 1970 in microseconds are, too."""
_LINES_PER_REPORT: Final = 4096
_EXAMPLE: Final = (
    "Each line must be an object such as "
    '{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}.'
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts in the order of their arrival, as columns. Prompt i has the blocks `blocks[first[i]:first[i + 1]]`, all
    of them whole: a block that is only partly filled cannot be stored, so it is left out.
    """

    block_tokens: int
    arrived_s: NDArray[np.float64]
    """Seconds since the first arrival."""
    tokens: IntArray
    output_tokens: IntArray
    blocks: IntArray
    first: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    def blocks_of(self, prompt: int) -> IntArray:
        """The whole blocks of a prompt."""
        return self.blocks[self.first[prompt] : self.first[prompt + 1]]

    def faster(self, times: float) -> Trace:
        """The same prompts, arriving ``times`` times as fast."""
        return Trace(
            self.block_tokens, self.arrived_s / times, self.tokens, self.output_tokens, self.blocks, self.first
        )


def read_trace(path: Path, block_tokens: int, limit: int = 0, progress: Progress = lambda done, total: None) -> Trace:
    """The first `limit` prompts (0: all) of a trace file. `progress` is told bytes read, and in all.

    Raises ConfigError for a file that cannot be read, and for the first line that is no prompt.
    """
    if block_tokens < 1:
        raise ConfigError(f"Blocks of {block_tokens} tokens cannot be; a trace of hash_ids has 512 as a rule.")
    times, tokens, output_tokens, blocks, first = array("d"), array("q"), array("q"), array("q"), array("q", [0])
    try:
        total_bytes = path.stat().st_size
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                prompt = _prompt(line, number, path, block_tokens)
                times.append(prompt[0])
                tokens.append(prompt[1])
                output_tokens.append(prompt[2])
                _add_blocks(blocks, prompt[3][: prompt[1] // block_tokens], number, path)
                first.append(len(blocks))
                if len(tokens) == limit:
                    break
                if number % _LINES_PER_REPORT == 0:
                    progress(file.tell(), total_bytes)
    except OSError as error:
        raise ConfigError(
            f"The trace {path} cannot be read: {error.strerror}. Give a file of lines. {_EXAMPLE}"
        ) from error
    if not tokens:
        raise ConfigError(f"The trace {path} has no prompts. {_EXAMPLE}")
    progress(total_bytes, total_bytes)
    return _in_order(block_tokens, times, tokens, output_tokens, blocks, first)


def _prompt(line: bytes, number: int, path: Path, block_tokens: int) -> tuple[float, int, int, list[Any]]:
    """Time in milliseconds, lengths and ids of one line."""
    try:
        entry = json.loads(line)
        prompt = entry["timestamp"], entry["input_length"], entry["output_length"], entry["hash_ids"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _bad_line(path, number, _why_not(line, error)) from error
    time_ms, length, output_length, ids = prompt
    if type(time_ms) not in (int, float) or not abs(time_ms) <= _TIME_MS_MAX:
        raise _bad_line(path, number, f"timestamp is {_short(time_ms)}; it must be a number of milliseconds")
    if type(length) is not int or not 0 < length <= _TOKENS_MAX:
        raise _bad_line(path, number, f"input_length is {length!r}; it must be a whole number of tokens above 0")
    if type(output_length) is not int or not 0 <= output_length <= _TOKENS_MAX:
        raise _bad_line(path, number, f"output_length is {output_length!r}; it must be a whole number of tokens")
    if type(ids) is not list:
        raise _bad_line(path, number, f"hash_ids is {_short(ids)}; it must be a list of whole numbers")
    if not length // block_tokens <= len(ids) <= -(-length // block_tokens):
        whole = -(-length // block_tokens)
        text = f"{len(ids)} hash_ids for {length} tokens; blocks of {block_tokens} tokens would be {whole}"
        raise _bad_line(path, number, f"{text}, if that is their size (--block-size)")
    return prompt


def _why_not(line: bytes, error: Exception) -> str:
    """The reason why a line's fields could not be read."""
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing; a prompt has {', '.join(_FIELDS)}"
    if isinstance(error, TypeError):
        return f"{_short(line.decode(errors='replace').strip())} is no object"
    return f"it is no JSON ({error})"


def _add_blocks(blocks: array[int], ids: list[Any], number: int, path: Path) -> None:
    try:
        blocks.extend(ids)
    except (TypeError, OverflowError) as error:
        raise _bad_line(path, number, "hash_ids must be whole numbers of at most 63 bits") from error


def _bad_line(path: Path, number: int, text: str) -> ConfigError:
    return ConfigError(f"Line {number} of the trace {path} cannot be used: {text}. {_EXAMPLE}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _in_order(
    block_tokens: int,
    times_ms: array[float],
    tokens: array[int],
    output_tokens: array[int],
    blocks: array[int],
    first: array[int],
) -> Trace:
    """The columns as arrays, sorted by time (stable)."""
    arrived_ms = np.frombuffer(times_ms, np.float64)
    flat = np.frombuffer(blocks, np.int64) if len(blocks) else np.zeros(0, np.int64)
    starts = np.frombuffer(first, np.int64)
    lengths, outputs = np.frombuffer(tokens, np.int64), np.frombuffer(output_tokens, np.int64)
    if (arrived_ms[1:] < arrived_ms[:-1]).any():
        order = np.argsort(arrived_ms, kind="stable")
        counts = np.diff(starts)[order]
        flat = np.concatenate([flat[starts[at] : starts[at + 1]] for at in order.tolist()])
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        arrived_ms, lengths, outputs = arrived_ms[order], lengths[order], outputs[order]
    return Trace(block_tokens, (arrived_ms - arrived_ms[0]) / 1000, lengths, outputs, flat, starts)
