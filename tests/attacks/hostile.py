"""Hostile files as code: each function leaves one in a cache directory, and says why it gets nowhere.

The directory holds a sealed segment of five chunks, which `Surgery` takes apart. Checksums are made right wherever that
helps the attacker: what is attacked here is the reader, not the checksum. (Who forges payloads with right checksums is
stopped by keys only: test_forgery.py.)
"""

from __future__ import annotations

import fcntl
import gzip
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

from stowage.core.geometry import PAGE_BYTES
from stowage.storage.format import envelope, segment
from stowage.storage.format.segment import ENTRY_BYTES, SegmentName
from tests.disk_client import NAMESPACE, only_segment
from tests.segment_surgery import Surgery, reseal
from tests.tier_client import key

LIMIT = 8 << 20
U64 = struct.Struct("<Q")
MASK, LENGTH, OFFSET = 72, 80, 128
"""Places of fields in a footer entry; the first two in an envelope too."""
ANOTHER = SegmentName(9, b"hostile!")

HOSTILE: dict[str, Callable[[Path], object]] = {}


def hostile(make: Callable[[Path], object]) -> Callable[[Path], object]:
    assert make.__doc__, "say why it fails"
    HOSTILE[make.__name__] = make
    return make


def stored(directory: Path) -> Surgery:
    return Surgery(only_segment(directory))


def put_in_footer(it: Surgery, chunk: int, field: int, value: int) -> None:
    at = it.footer + chunk * ENTRY_BYTES + field
    it.data[at : at + 8] = U64.pack(value)


def put_in_trailer(it: Surgery, field: int, value: int) -> None:
    it.data[-PAGE_BYTES + field : -PAGE_BYTES + field + 8] = U64.pack(value)


def put_in_batch(it: Surgery, field: int, raw: bytes) -> None:
    """Changes the batch's page, and removes the footer, which could say it better."""
    it.data[PAGE_BYTES + field : PAGE_BYTES + field + len(raw)] = raw
    del it.data[it.footer :]
    it.data += bytes(4 * PAGE_BYTES)
    reseal(it.data, PAGE_BYTES)
    it.save(seal=False)


def leave(directory: Path, content: bytes, name: SegmentName = ANOTHER) -> Path:
    path = directory / str(name)
    path.write_bytes(content)
    path.chmod(0o600)
    return path


# numbers that are too large


@hostile
def a_footer_of_two_to_the_63_bytes(directory: Path) -> None:
    """The trailer says how long the footer is. Nothing is allocated before offset, length and count add up to the
    file's length; this is no trailer, and the batches are scanned instead.
    """
    it = stored(directory)
    put_in_trailer(it, 32, 1 << 63)
    it.save()


@hostile
def a_million_entries_in_a_small_file(directory: Path) -> None:
    """Count and length agree with each other, not with the file's length."""
    it = stored(directory)
    put_in_trailer(it, 32, segment.ENTRIES_MAX * ENTRY_BYTES)
    put_in_trailer(it, 40, segment.ENTRIES_MAX)
    it.save()


@hostile
def a_footer_that_begins_before_the_batches(directory: Path) -> None:
    """It would make batches part of the footer. A footer lies behind a header and a batch of two pages at least."""
    it = stored(directory)
    put_in_trailer(it, 24, 0)
    it.save()


@hostile
def a_chunk_longer_than_memory(directory: Path) -> None:
    """2^62 bytes, in the footer. Lengths are held against the file before anything is indexed."""
    it = stored(directory)
    put_in_footer(it, 2, LENGTH, 1 << 62)
    it.save()


@hostile
def a_length_that_wraps_around(directory: Path) -> None:
    """Rounded up to pages, 2^64 - 1 is 0, so offset + length would lie in the file. The length is checked by itself."""
    it = stored(directory)
    put_in_footer(it, 2, LENGTH, (1 << 64) - 1)
    it.save()


@hostile
def an_offset_that_wraps_around(directory: Path) -> None:
    """2^64 - 4096 plus a length is small again. The offset is checked by itself, too."""
    it = stored(directory)
    put_in_footer(it, 2, OFFSET, (1 << 64) - PAGE_BYTES)
    it.save()


@hostile
def a_batch_of_65535_chunks(directory: Path) -> None:
    """A page has room for 31 envelopes; with more the reader would run off the page."""
    put_in_batch(stored(directory), 10, struct.pack("<H", 65535))


@hostile
def a_batch_that_ends_beyond_the_file(directory: Path) -> None:
    """Its payloads would be read from where nothing is. A batch counts if it lies in the file whole."""
    put_in_batch(stored(directory), 32, U64.pack(1 << 40))


@hostile
def a_batch_without_length(directory: Path) -> None:
    """The next batch would begin where this one does, for ever. Header page and payloads must add up to the length."""
    put_in_batch(stored(directory), 32, U64.pack(0))


@hostile
def a_batch_that_leads_back(directory: Path) -> None:
    """A length of -4096 makes the scan go backwards and round and round; it does not add up either."""
    put_in_batch(stored(directory), 32, U64.pack((1 << 64) - PAGE_BYTES))


# places that are wrong


@hostile
def a_payload_in_the_header_page(directory: Path) -> None:
    """The segment's header would be handed out as a chunk. Payloads begin behind the first batch's page."""
    it = stored(directory)
    put_in_footer(it, 0, OFFSET, 0)
    it.save()


@hostile
def a_payload_in_the_footer(directory: Path) -> None:
    """The index would be handed out as a chunk. Payloads end before the footer."""
    it = stored(directory)
    put_in_footer(it, 0, OFFSET, it.footer)
    it.save()


@hostile
def a_payload_between_two_pages(directory: Path) -> None:
    """Direct reads of an odd offset fail, and with them all neighbours'. Offsets are whole pages."""
    it = stored(directory)
    put_in_footer(it, 3, OFFSET, it.offsets[3] + 512)
    it.save()


@hostile
def all_entries_lead_to_one_payload(directory: Path) -> None:
    """Every entry is possible by itself. The checksum covers key and payload: at most one of them verifies."""
    it = stored(directory)
    for chunk in range(it.count):
        put_in_footer(it, chunk, OFFSET, it.offsets[0])
        put_in_footer(it, chunk, LENGTH, it.lengths[0])
    it.save()


@hostile
def two_records_of_one_key(directory: Path) -> None:
    """The later one, which wins, leads to another chunk's bytes: it does not verify, and the key is absent. The earlier
    one is not tried, and need not be.
    """
    it = stored(directory)
    it.put(3, 8, key(0))
    it.save()


@hostile
def a_trailer_inside_a_payload(directory: Path) -> None:
    """What tenants store may look like our own pages. The file is cut behind such a payload, so that it ends with a
    trailer which is right in all but the segment's id: 8 random bytes that whoever fills payloads does not know.
    """
    it = stored(directory)
    end = it.offsets[2] + 2 * PAGE_BYTES
    fake = segment.pack_footer([segment.np.zeros(1, segment._ENTRY)], b"guessed!", end - 2 * PAGE_BYTES)
    it.path.write_bytes(it.data[: end - len(fake)] + fake)


# sizes


@hostile
def a_sparse_giant(directory: Path) -> None:
    """8 TiB that take no room on disk. What is longer than the directory's limit is not read at all."""
    os.truncate(stored(directory).path, 1 << 43)


@hostile
def a_hole_up_to_the_limit(directory: Path) -> None:
    """A whole header and then nothing: the scan ends at the first page that is no batch."""
    it = stored(directory)
    it.path.write_bytes(it.data[:PAGE_BYTES])
    os.truncate(it.path, LIMIT - (1 << 20))


@hostile
def a_hole_as_footer(directory: Path) -> None:
    """50,000 entries of zeros with a right checksum, which cost the attacker two pages. They are read (no more than the
    file is long) and none is an envelope.
    """
    it = stored(directory)
    count, begin = 50_000, it.footer
    length = begin + segment.footer_room(count)
    with it.path.open("r+b") as file:
        file.truncate(begin)
        file.truncate(length)
        digest = segment.xxhash.xxh3_128_digest(bytes(count * ENTRY_BYTES))
        fields = (b"STOWEND1", 1, it.name.id, begin, count * ENTRY_BYTES, count, digest)
        file.seek(length - PAGE_BYTES)
        file.write(segment._seal_page(segment._TRAILER.pack(*fields)))


@hostile
def hundreds_of_batches_of_one_byte_each(directory: Path) -> None:
    """A torn segment with no room for a footer: repair gives up batches from the end, which must not take the square of
    their number; and it reads many pages at once, not one at a time.
    """
    count, name = 900, SegmentName(1, b"scanned!")
    size = PAGE_BYTES + count * 2 * PAGE_BYTES
    path = leave(directory, segment.pack_segment_header(name, size, NAMESPACE), name)
    os.truncate(path, size)
    with path.open("r+b") as file:
        for number in range(count):
            at = PAGE_BYTES + number * 2 * PAGE_BYTES
            header = envelope.pack_fields(key(("tiny", number)), NAMESPACE, 1, 1) + bytes(16)
            file.seek(at)
            file.write(segment.pack_batch_page(name.id, at, [header], [1]))


# other files


@hostile
def a_pickle(directory: Path) -> None:
    """It would run a command if anything here unpickled. Nothing does: it has no header page, and is left alone."""
    leave(directory, b"cposix\nsystem\n(S'touch %s'\ntR." % os.fsencode(directory.parent / "outside" / "owned") * 200)


@hostile
def a_compressed_bomb(directory: Path) -> None:
    """64 MiB of zeros in 64 KiB. Nothing here decompresses."""
    leave(directory, gzip.compress(bytes(64 << 20)))


@hostile
def a_tensor_file(directory: Path) -> None:
    """Its first eight bytes announce a header of 2^62 bytes, as other loaders would allocate it."""
    leave(directory, U64.pack(1 << 62) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' + bytes(PAGE_BYTES))


@hostile
def the_right_magic_and_then_noise(directory: Path) -> None:
    """Ten files of it. A page is believed if its checksum fits."""
    for number in range(10):
        noise = random.Random(number).randbytes(3 * PAGE_BYTES)
        leave(directory, (b"STOWSEG1\1\0" + noise)[: 3 * PAGE_BYTES], SegmentName(number + 2, bytes(8)))


@hostile
def hundreds_of_empty_segments(directory: Path) -> None:
    """What killed writers leave, many times over: removed at the next opening, one look at each."""
    for number in range(300):
        leave(directory, b"", SegmentName(number + 2, number.to_bytes(8, "little")))


@hostile
def the_last_sequence_number(directory: Path) -> None:
    """Nothing can be newer, so that new segments do not know where to go. They get the same number, and other ids."""
    it = stored(directory)
    name = SegmentName((1 << 63) - 1, it.name.id)
    it.path.rename(directory / str(name))
    it.data[24:32] = U64.pack(name.sequence)
    reseal(it.data, 0)
    (directory / str(name)).write_bytes(it.data)


@hostile
def names_that_are_not_ours(directory: Path) -> None:
    """Upper case, line breaks, bytes that are no UTF-8, names of 255 bytes, a sequence number above 2^63. None is a
    segment's name, so none is opened or removed; they count towards the limit.
    """
    good = str(ANOTHER)
    others = [good.upper(), good + "\n", "\n" + good, good.replace("-", "_"), "f" + good[1:], good + "x" * 200, "-.seg"]
    for name in others:
        (directory / name).write_bytes(b"x")
    (Path(os.fsdecode(os.fsencode(directory) + b"/\xff\xfe.seg"))).write_bytes(b"x")


@hostile
def links_to_devices_and_to_themselves(directory: Path) -> None:
    """/dev/zero never ends, and a link to itself has no end either. Links are not followed; nor are they segments."""
    (directory / str(SegmentName(2, bytes(8)))).symlink_to("/dev/zero")
    (directory / str(SegmentName(3, bytes(8)))).symlink_to(str(SegmentName(3, bytes(8))))


@hostile
def a_torn_segment_that_somebody_holds_for_ever(directory: Path) -> object:
    """Its lock says that it is being written. It is read as far as it goes, never repaired, never waited for."""
    it = stored(directory)
    it.path.write_bytes(it.data[: it.footer])
    holder = it.path.open("rb")
    fcntl.flock(holder, fcntl.LOCK_EX)
    return holder


@hostile
def a_segment_of_every_mode(directory: Path) -> None:
    """Set-user-id, executable, writable for all: nothing runs it, and nobody else comes through the directory."""
    stored(directory).path.chmod(0o6777)
