"""Reading a trace: what is taken from it, and what every bad line is told."""

import json
from pathlib import Path

import pytest

from stowage.errors import ConfigError
from stowage.simulator.trace import read_trace

GOOD = {"timestamp": 5, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3]}


def written(path: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def test_columns(tmp_path: Path) -> None:
    later = GOOD | {"timestamp": 1005, "input_length": 32, "hash_ids": [1, 9]}
    trace = read_trace(written(tmp_path / "t", GOOD, "", later, ""), 16)
    assert len(trace) == 2 and trace.arrived_s.tolist() == [0, 1] and trace.tokens.tolist() == [40, 32]
    assert trace.output_tokens.tolist() == [3, 3]
    assert trace.blocks_of(0).tolist() == [1, 2] and trace.blocks_of(1).tolist() == [1, 9]
    assert trace.faster(4).arrived_s.tolist() == [0, 0.25]


def test_a_limit_and_the_order_of_time(tmp_path: Path) -> None:
    lines = [GOOD | {"timestamp": at, "output_length": number} for number, at in enumerate((3000, 1000, 1000, 2000))]
    lines[3] |= {"input_length": 16, "hash_ids": [7]}
    path = written(tmp_path / "t", *lines)
    trace = read_trace(path, 16)
    assert trace.output_tokens.tolist() == [1, 2, 3, 0] and trace.arrived_s.tolist() == [0, 0, 1, 2]
    assert [trace.blocks_of(at).tolist() for at in range(4)] == [[1, 2], [1, 2], [7], [1, 2]]
    assert len(read_trace(path, 16, limit=2)) == 2


def test_ids_of_whole_blocks_only_are_enough(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t", GOOD | {"hash_ids": [1, 2]}), 16)
    assert trace.blocks_of(0).tolist() == [1, 2]


def test_progress_ends_at_the_end(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = written(tmp_path / "t", *[GOOD] * 5000)
    read_trace(path, 16, progress=lambda done, total: told.append((done, total)))
    assert len(told) == 2 and told[-1] == (path.stat().st_size, path.stat().st_size) and told[0] <= told[1]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "no JSON"),
        ("[1, 2]", "no object"),
        ("7", "no object"),
        ("\xff", "no JSON"),
        ({"timestamp": 0, "input_length": 1, "output_length": 1}, "hash_ids is missing"),
        (GOOD | {"timestamp": "now"}, "timestamp is 'now'"),
        (GOOD | {"timestamp": float("nan")}, "timestamp is nan"),
        (GOOD | {"timestamp": 10**400}, "timestamp is 1000"),
        (GOOD | {"timestamp": -1e300}, "timestamp is -1e+300"),
        (GOOD | {"timestamp": 1_795_889_832_000_000}, "milliseconds"),
        (GOOD | {"input_length": 0}, "input_length is 0"),
        (GOOD | {"input_length": 40.0}, "input_length is 40.0"),
        (GOOD | {"input_length": True}, "input_length is True"),
        (GOOD | {"output_length": -1}, "output_length is -1"),
        (GOOD | {"hash_ids": 5}, "hash_ids is 5"),
        (GOOD | {"hash_ids": [1]}, "1 hash_ids for 40 tokens; blocks of 16 tokens would be 3"),
        (GOOD | {"hash_ids": [1, 2, 3, 4]}, "--block-size"),
        (GOOD | {"hash_ids": [1, "2", 3]}, "whole numbers"),
        (GOOD | {"hash_ids": [1, 1 << 70, 3]}, "63 bits"),
    ],
)
def test_a_bad_line_is_named(line: object, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Line 3 of the trace") as caught:
        read_trace(written(tmp_path / "t", GOOD, "", line), 16)
    assert text in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "nothing", 16)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path, 16)
    with pytest.raises(ConfigError, match="no prompts"):
        read_trace(written(tmp_path / "t", ""), 16)
    with pytest.raises(ConfigError, match="0 tokens"):
        read_trace(written(tmp_path / "t", GOOD), 0)
