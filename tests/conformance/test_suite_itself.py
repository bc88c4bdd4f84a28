"""What the suite needs from whoever uses it: hypothesis, nothing else; and the part that remembers what is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stowage
from stowage.testing.tier_model import TierModel, TransferBuffers, content_of

SOURCE = Path(stowage.__file__).parents[1]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True)


def test_it_is_imported_without_pytest() -> None:
    done = python("import sys; sys.modules['pytest'] = None\nfrom stowage.testing import TierConformance")
    assert done.returncode == 0, done.stderr


def test_without_hypothesis_the_error_names_the_fix() -> None:
    done = python("import sys; sys.modules['hypothesis'] = None\nfrom stowage.testing import TierConformance")
    assert done.returncode != 0
    assert "pip install 'stowage[testing]'" in done.stderr


def test_the_rest_of_testing_needs_no_hypothesis() -> None:
    done = python("import sys; sys.modules['hypothesis'] = None\nimport stowage.testing.faults")
    assert done.returncode == 0, done.stderr


def test_the_suite_is_found_by_unittest_too(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import unittest\nfrom docs.examples.dict_tier import DictTier\nfrom stowage.testing import TierConformance\n"
        "class TestMine(TierConformance, unittest.TestCase):\n    examples = 2\n"
        "    def make_tier(self, directory):\n        return DictTier(1 << 20)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "-q", "test_mine"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{SOURCE}:{SOURCE.parent}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Ran 2 tests" in done.stderr, done.stderr


def test_a_store_that_overlaps_another_may_win_or_lose() -> None:
    model = TierModel(keeps_bytes=1 << 20)
    first, second = model.begin_store(1, 1, 100), model.begin_store(1, 3, 100)
    model.end_store(second, True)
    model.end_store(first, True)
    assert model.masks(1) == {1, 3} and model.certain(1) is None
    third = model.begin_store(1, 7, 100)
    model.end_store(third, True)
    assert model.masks(1) == {7} and model.certain(1) is third


def test_a_load_may_bring_what_is_replaced_while_it_runs_and_no_later_one_may() -> None:
    model = TierModel(keeps_bytes=0)
    first = model.begin_store(1, 1, 100)
    model.end_store(first, True)
    since = model.now
    second = model.begin_store(1, 3, 100)
    model.end_store(second, True)
    assert model.loadable(1, since) == [first, second]
    assert model.loadable(1, model.now) == [second]


def test_a_failed_store_replaces_nothing_and_may_be_found() -> None:
    model = TierModel(keeps_bytes=1 << 20)
    first = model.begin_store(1, 1, 100)
    model.end_store(first, True)
    second = model.begin_store(1, 3, 100)
    model.end_store(second, False)
    assert model.masks(1) == {1, 3} and model.certain(1) is None


def test_what_was_discarded_may_be_back_after_reopening() -> None:
    model = TierModel(keeps_bytes=1 << 20)
    model.end_store(model.begin_store(1, 1, 100), True)
    model.discard([1])
    assert model.masks(1) == set() and model.certain(1) is None
    model.reopen()
    assert model.masks(1) == {1} and model.certain(1) is None


def test_masks_always_gain_until_there_is_nothing_to_gain() -> None:
    model = TierModel(keeps_bytes=0)
    before = 0
    for _ in range(64):
        mask = model.next_mask(5, 0b11)
        assert mask & before == before and mask != before
        before = mask
        model.begin_store(5, mask, 16)
        if mask == (1 << 64) - 1:
            break
    assert model.next_mask(5, 0b11) == 0 and before == (1 << 64) - 1


@pytest.mark.parametrize("shifted", [False, True])
def test_tripwires(shifted: bool) -> None:
    lengths = [100, 4096, 5000]
    lent = TransferBuffers(lengths, shifted)
    assert [buffer.nbytes for buffer in lent.buffers] == lengths
    places = [np.frombuffer(buffer, np.uint8).ctypes.data % 4096 for buffer in lent.buffers]
    assert places == [24 if shifted else 0] * 3
    for number, buffer in enumerate(lent.buffers):
        buffer[7] ^= 1
        assert lent.damage(buffers_too=False) == ""
        assert lent.damage(buffers_too=True) == f"byte 7 of buffer {number}"
        buffer[7] ^= 1
    memory = lent.buffers[1].obj
    start = next(at for at in range(len(memory)) if memory[at : at + 4096].tobytes() == bytes(lent.buffers[1]))
    for at, words in ((start - 3, "a byte 3 bytes before the beginning of buffer 1"), (start + 4096, "after the end")):
        memory[at] ^= 1
        assert words in lent.damage(buffers_too=False)
        memory[at] ^= 1
    assert lent.damage(buffers_too=True) == ""


def test_bytes_are_traced_to_where_they_came_from() -> None:
    model = TierModel(keeps_bytes=0)
    one, other = model.begin_store(1, 1, 64), model.begin_store(2, 1, 64)
    assert "those of store 2 of key 2" in model.explain(other.content, 1)
    assert "only the first 20 bytes are those of store 1 of key 1" in model.explain(one.content[:20] + bytes(44), 1)
    assert "too late" in model.explain(bytes([0xEE]) * 64, 1)
    assert "nothing was written" in model.explain(bytes([0xB1]) * 64, 1)
    assert "no store put there anything like it" in model.explain(content_of(9, 9, 64), 1)
