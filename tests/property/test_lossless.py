"""The lossless code: every bit pattern comes back, in C and in numpy, and no bytes make it read or write elsewhere."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.core import lossless, lossless_blocks
from stowage.errors import FormatError
from stowage.native import extension
from stowage.native.switches import PURE_PYTHON
from tests.native import needs_native

WAYS = ("base", "avx2", "avx512")


def has(way: str) -> bool:
    """Whether this processor can go that way."""
    try:
        extension.use_steps(way)
    except ValueError:
        return False
    finally:
        extension.use_steps(None)
    return True


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    if extension is None or not has(request.param):
        pytest.skip(f"no {request.param} here")
    yield str(extension.use_steps(request.param))
    extension.use_steps(None)


def packed_in_c(raw: bytes) -> bytes:
    room = memoryview(bytearray(len(raw) + len(raw) // 512 + 64))
    return bytes(room[: extension.pack_floats(memoryview(raw), room)])


def unpacked(packed: bytes, length: int) -> tuple[int, bytes]:
    buffer = bytearray(length)
    return extension.unpack_floats(memoryview(packed), memoryview(buffer)), bytes(buffer)


def floats(kind: str, count: int, seed: int = 0) -> bytes:
    numbers = np.random.default_rng(seed).standard_normal(count, np.float32)
    if kind == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    return numbers.astype("<f2" if kind == "float16" else "<f4").tobytes()


def odd_bytes(chance: random.Random) -> bytes:
    """Words of few or many exponents, of any number, in any order of frequency."""
    exponents = [chance.randrange(256) for _ in range(chance.choice((1, 2, 3, 7, 20, 63, 64, 65, 96, 97, 200)))]
    step = chance.choice((0.05, 0.3, 0.9))
    count = chance.choice((0, 1, 2, 63, 64, 65, 500, 4095, 4096, 4097, 9000))
    words = []
    for _ in range(count):
        at = min(int(chance.expovariate(step)), len(exponents) - 1)
        turned = exponents[at] << 8 | chance.randrange(256)
        words.append((turned >> 1 | turned << 15) & 0xFFFF)
    return np.array(words, "<u2").tobytes() + chance.choice((b"", b"\xff"))


@needs_native
def test_every_word_of_16_bits_comes_back(way: str) -> None:
    words = np.arange(1 << 16, dtype="<u2")
    for raw in (words.tobytes(), words.byteswap().tobytes(), np.repeat(words, 3).tobytes()[:-1]):
        packed = packed_in_c(raw)
        assert unpacked(packed, len(raw)) == (0, raw)


@needs_native
def test_all_ways_give_the_bytes_that_numpy_gives(way: str) -> None:
    chance = random.Random(29)
    for _ in range(150):
        raw = odd_bytes(chance)
        packed = packed_in_c(raw)
        assert packed == lossless_blocks.pack(raw)
        assert unpacked(packed, len(raw)) == (0, raw)
        buffer = bytearray(len(raw))
        assert lossless_blocks.unpack(packed, memoryview(buffer)) == lossless_blocks.WHOLE and buffer == raw


@pytest.mark.parametrize(
    "kind, share", [("bfloat16", 0.68), ("float16", 0.87), ("float32", 0.85)], ids=lambda value: str(value)
)
def test_numbers_of_each_kind_take_fewer_bytes(kind: str, share: float) -> None:
    raw = floats(kind, 50_000)
    packed = lossless_blocks.pack(raw)
    assert len(packed) < share * len(raw)
    if extension is not None:
        assert packed_in_c(raw) == packed


def assert_round(raw: bytes) -> None:
    buffer = bytearray(len(raw))
    assert lossless_blocks.unpack(lossless_blocks.pack(raw), memoryview(buffer)) == lossless_blocks.WHOLE
    assert buffer == raw


def in_single_blocks(raw: bytes) -> int:
    """Bytes of blocks that know nothing of each other."""
    size = lossless_blocks.RAW_MAX
    return sum(len(packed_in_c(raw[at : at + size])) - 16 for at in range(0, len(raw), size))


@pytest.mark.parametrize("run", [1, 2, 5, 40])
def test_a_shape_that_serves_the_next_blocks_costs_little_where_numbers_change(way: str, run: int) -> None:
    """Numbers of two kinds in turn, in runs of so many blocks, noise, other types: the bytes that numpy gives, and few
    more than where each block has its own shape.
    """
    words = lossless_blocks.RAW_MAX // 2 * run
    parts = []
    for seed in range(80 // run):
        numbers = np.random.default_rng(seed).standard_normal(words, np.float32)
        wide = numbers * np.exp2(np.random.default_rng(-seed % 97).integers(-3, 4, words)).astype(np.float32)
        parts.append(((wide if seed % 2 else numbers).view(np.uint32) >> 16).astype("<u2").tobytes())
    raw = (
        b"".join(parts) + np.random.default_rng(1).bytes(30_000) + floats("float32", 9_000) + floats("bfloat16", 9_001)
    )
    packed = packed_in_c(raw)
    assert packed == lossless_blocks.pack(raw)
    assert unpacked(packed, len(raw)) == (lossless_blocks.WHOLE, raw)
    assert len(packed) <= 1.02 * in_single_blocks(raw)


def test_infinities_payloads_and_denormals_in_one_block() -> None:
    words = np.frombuffer(floats("bfloat16", 4096), "<u2").copy()
    words[::7] = np.resize(np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8000, 0x7F81, 0x807F], "<u2"), 586)
    assert_round(words.tobytes())
    if extension is not None:
        assert unpacked(packed_in_c(words.tobytes()), words.nbytes) == (0, words.tobytes())


@needs_native
def test_symbols_that_no_sample_has_are_no_reason_to_give_up(way: str) -> None:
    """Only a quarter is counted: what is not in it is an escape, whatever fills the levels up."""
    for rare in range(0, 256, 5):
        high = np.resize(np.array([0x7F, 0x7E, 0x80, 0x7D, 0x7C, 0x81], "<u2"), 4096)
        high[64:70] = rare
        words = high << 8 | np.random.default_rng(rare).integers(0, 256, 4096, dtype=np.uint16)
        raw = (words >> 1 | words << 15).astype("<u2").tobytes()
        packed = packed_in_c(raw)
        assert packed == lossless_blocks.pack(raw) and len(packed) < 0.75 * len(raw)
        assert unpacked(packed, len(raw)) == (0, raw)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 60))
def test_short_and_repeated_bytes_come_back(raw: bytes, times: int) -> None:
    assert_round(raw)
    if extension is not None:
        assert unpacked(packed_in_c(raw * times), len(raw) * times) == (0, raw * times)


def test_a_sample_that_promised_too_much_costs_nothing() -> None:
    """The counted quarter has a dozen symbols, the rest is noise: the block stays as it is."""
    chance = np.random.default_rng(3)
    high = chance.integers(0, 256, 4096, dtype=np.uint16)
    counted = np.arange(4096) // 64 % 4 == 0
    high[counted] = chance.integers(100, 112, int(counted.sum()))
    words = high << 8 | chance.integers(0, 256, 4096, dtype=np.uint16)
    raw = (words >> 1 | words << 15).astype("<u2").tobytes()
    assert_round(raw)
    packed = lossless_blocks.pack(raw)
    assert len(raw) < len(packed) < len(raw) + 64
    if extension is not None:
        assert packed_in_c(raw) == packed


def test_without_compiled_code_numpy_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "is_wanted", lambda: False)
    for raw, pays in ((floats("bfloat16", 20_000), True), (random.Random(2).randbytes(50_000), False)):
        room = memoryview(bytearray(lossless.worth_bytes(len(raw))))
        length = lossless.pack(memoryview(raw), room)
        assert (length > 0) == pays
        if pays:
            buffer = bytearray(len(raw))
            lossless.unpack(room[:length], memoryview(buffer))
            assert buffer == raw


def test_what_does_not_pay_is_not_packed() -> None:
    noise = random.Random(1).randbytes(50_000)
    assert lossless.pack(memoryview(noise), memoryview(bytearray(lossless.worth_bytes(len(noise))))) == 0
    assert lossless.worth_bytes(lossless.LEAST_BYTES - 1) == 0


@pytest.mark.parametrize("pure", [False, True])
def test_the_face_unpacks_with_padding_and_refuses_the_rest(pure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pure:
        monkeypatch.setenv(PURE_PYTHON, "1")
    raw = floats("bfloat16", 6000)
    room = memoryview(bytearray(len(raw) + 4096))
    length = lossless.pack(memoryview(raw), room)
    assert 0 < length < 0.7 * len(raw)
    buffer = memoryview(bytearray(len(raw)))
    lossless.unpack(room[: length + 4095], buffer)
    assert buffer == raw
    for packed, target in (
        (room[: length + 4096], buffer),
        (room[: length - 1], buffer),
        (room[:length], buffer[:-2]),
        (memoryview(b""), buffer),
        (memoryview(b"STLD" + bytes(room[4:length])), buffer),
    ):
        with pytest.raises(FormatError, match="does not unpack"):
            lossless.unpack(packed, target)
    later = bytearray(room[:length])
    later[4] = 2
    with pytest.raises(lossless.UnknownCode, match="does not know"):
        lossless.unpack(memoryview(later), buffer)


@needs_native
def test_damaged_bytes_are_refused_or_unpacked_alike(way: str) -> None:
    """Numpy checks every bound: C must take and refuse the same, and give the same bytes for what it takes."""
    chance = random.Random(7)
    raws = [floats("bfloat16", 4500), floats("float16", 4100) + b"x", floats("float32", 700), odd_bytes(chance)]
    taken = 0
    for turn in range(400):
        raw = raws[turn % len(raws)]
        damaged = bytearray(packed_in_c(raw))
        for _ in range(chance.choice((1, 1, 2, 8))):
            place = (
                chance.randrange(len(damaged)) if chance.random() < 0.5 else chance.randrange(16, min(60, len(damaged)))
            )
            damaged[place] = chance.randrange(256)
        if chance.random() < 0.2:
            del damaged[chance.randrange(len(damaged)) :]
        guard = bytearray(b"\xa5" * (len(raw) + 256))
        result = extension.unpack_floats(memoryview(damaged), memoryview(guard)[128 : 128 + len(raw)])
        buffer = bytearray(len(raw))
        assert result == lossless_blocks.unpack(bytes(damaged), memoryview(buffer))
        assert guard[:128] == guard[128 + len(raw) :] == b"\xa5" * 128
        if result == lossless_blocks.WHOLE:
            taken += 1
            assert guard[128 : 128 + len(raw)] == buffer
    assert taken


@needs_native
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shift", [0, 8, 32])
def test_long_payloads_that_are_written_past_the_caches_come_back_wherever_they_go(
    kind: str, shift: int, way: str
) -> None:
    raw = floats(kind, 50_003)
    whole = memoryview(mmap.mmap(-1, len(raw) + 4096))
    buffer = whole[shift : shift + len(raw)]
    lossless.unpack(memoryview(packed_in_c(raw)), buffer)
    assert bytes(buffer) == raw
    assert not any(whole[:shift]) and not any(whole[shift + len(raw) :])


FRAME = 10_000


def in_frames(raw: bytes) -> tuple[bytes, np.ndarray]:
    """Packed frames of a payload, one behind the other; every third lies as it is."""
    frames = [raw[at : at + FRAME] for at in range(0, len(raw), FRAME)]
    packed = [frame if n % 3 == 2 else packed_in_c(frame) for n, frame in enumerate(frames)]
    return b"".join(packed), np.array([len(one) for one in packed], np.int64)


@needs_native
@pytest.mark.parametrize("pure", [False, True])
def test_frames_come_back_and_others_are_refused(pure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = floats("bfloat16", 27_511)
    packed, lengths = in_frames(raw)
    if pure:
        monkeypatch.setenv(PURE_PYTHON, "1")
    buffer = bytearray(len(raw))
    lossless.unpack_frames(memoryview(packed), lengths, FRAME, memoryview(buffer))
    assert bytes(buffer) == raw
    damaged = bytearray(packed)
    damaged[3] ^= 1
    for some, of, length in (
        (packed, lengths + 1, len(raw)),
        (packed, lengths, len(raw) - 1),
        (packed, lengths, len(raw) + 1),
        (packed, lengths[:-1], len(raw)),
        (packed[:-1], lengths, len(raw)),
        (bytes(damaged), lengths, len(raw)),
    ):
        with pytest.raises(FormatError):
            lossless.unpack_frames(memoryview(some), of, FRAME, memoryview(bytearray(length)))


@needs_native
@pytest.mark.parametrize("pure", [False, True])
def test_payloads_are_packed_one_behind_the_other(pure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pure:
        monkeypatch.setenv(PURE_PYTHON, "1")
    raw = [
        floats("bfloat16", 9_000),
        random.Random(0).randbytes(9_000),
        floats("bfloat16", 9_000, 1),
        floats("float16", 5_001),
    ]
    most = [len(raw[0]), len(raw[1]), 0, len(raw[3])]
    step = 512
    room = memoryview(bytearray(b"\xff" * (sum(map(len, raw)) + 4 * step)))
    lengths = lossless.pack_frames([memoryview(one) for one in raw], most, step, room)
    assert lengths[0] and lengths[3] and lengths[1:3] == [0, 0], "noise is no shorter, and one was not to be tried"
    assert all(length % step == 0 for length in lengths)
    for number, at in ((0, 0), (3, lengths[0])):
        packed = packed_in_c(raw[number])
        assert lengths[number] - step < len(packed) <= lengths[number]
        assert bytes(room[at : at + lengths[number]]) == packed.ljust(lengths[number], b"\0")
    if not pure:
        short = memoryview(bytearray(lengths[0] - 1))
        assert (
            extension.pack_frames([memoryview(raw[0])], np.array([len(raw[0])]), step, short, np.zeros(1, np.int64))
            is None
        )
        with pytest.raises(ValueError, match="a length for each"):
            extension.pack_frames([memoryview(raw[0])], np.zeros(2, np.int64), step, room, np.zeros(1, np.int64))
