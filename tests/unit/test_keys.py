"""The key file: what may be in it, who may have it, and how it changes. Attacks on it are refused with the way out."""

from __future__ import annotations

import multiprocessing
import os
import stat
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from stowage.errors import ConfigError
from stowage.storage import key_file
from stowage.storage.format.protection import Method, SecretKey

SECRET = "0123456789abcdef" * 4
GOOD = f"stowage-key-1 {SECRET}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    key_file.make(path)
    return path


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def ids(path: Path) -> list[bytes]:
    return [key.id for key in key_file.read(path)]


def refusal(path: Path, action: Callable[[Path], object] = key_file.read) -> str:
    """The paragraph that a user sees. Whatever went wrong, no secret is in it, nor in the traceback."""
    with pytest.raises(ConfigError) as caught:
        action(path)
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown and SECRET[8:24] not in shown
    return str(caught.value)


def test_a_new_file_holds_one_key_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        made = key_file.make(tmp_path / "open")
        os.umask(0o777)
        key_file.make(tmp_path / "closed")
    finally:
        os.umask(before)
    for name in ("open", "closed"):
        status = (tmp_path / name).stat()
        assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_uid == os.geteuid()
    assert ids(tmp_path / "open") == [made.id] != ids(tmp_path / "closed"), "no two keys are the same"
    assert (tmp_path / "open").read_text() == f"stowage-key-1 {made.reveal()}\n"


def test_missing_directories_are_made_for_the_owner_alone(tmp_path: Path) -> None:
    made = tmp_path / "config" / "stowage" / "keys"
    key_file.make(made)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made.parent.parent, made.parent, made)] == [
        0o700,
        0o700,
        0o600,
    ]


def test_a_file_that_exists_is_not_overwritten(file: Path) -> None:
    before = file.read_bytes()
    assert "key rotate" in refusal(file, key_file.make) and file.read_bytes() == before
    dangling = file.with_name("link")
    dangling.symlink_to(file.with_name("elsewhere"))
    refusal(dangling, key_file.make)
    assert not file.with_name("elsewhere").exists()


def test_rotation_puts_a_new_key_in_front_and_keeps_the_others(file: Path) -> None:
    known = ids(file)
    for _ in range(3):
        known.insert(0, key_file.rotate(file).id)
        assert ids(file) == known
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["keys"], "no temporary file is left"


def test_a_dropped_key_is_gone_and_the_writing_one_stays(file: Path) -> None:
    key_file.rotate(file)
    newest = key_file.rotate(file).id
    front, middle, oldest = ids(file)
    assert front == newest
    key_file.drop(file, middle.hex().upper())
    assert ids(file) == [front, oldest]
    assert "key rotate" in refusal(file, lambda path: key_file.drop(path, front.hex()))
    assert oldest.hex() in refusal(file, lambda path: key_file.drop(path, middle.hex()))
    assert ids(file) == [front, oldest]


def test_at_most_64_keys(file: Path) -> None:
    for _ in range(key_file.KEYS_MAX - 1):
        key_file.rotate(file)
    assert len(ids(file)) == key_file.KEYS_MAX
    assert "key drop" in refusal(file, key_file.rotate)
    write(file, file.read_text() + GOOD)
    assert "more than 64" in refusal(file)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        SECRET,
        GOOD.replace("-1", "-2"),
        GOOD.replace(" ", "  "),
        GOOD.upper(),
        GOOD.replace("\n", "\r\n"),
        GOOD[:-3] + "\n",
        GOOD[:-1] + "00\n",
        GOOD[:-2] + "g\n",
        GOOD + "\n",
        GOOD + "# a comment\n",
        GOOD + GOOD,
        GOOD + GOOD[:40],
        " " + GOOD,
        "\N{ZERO WIDTH SPACE}" + GOOD,
        b"\xff\xfe" + GOOD.encode(),
        GOOD.encode() + bytes(1 << 20),
    ],
)
def test_anything_but_keys_is_refused_and_not_shown(tmp_path: Path, text: str | bytes) -> None:
    path = write(tmp_path / "keys", text)
    assert str(path) in refusal(path)
    refusal(path, key_file.rotate)
    assert path.read_bytes() == (text.encode() if isinstance(text, str) else text), "left as it is"


def test_a_last_line_without_its_end_is_read(tmp_path: Path) -> None:
    assert ids(write(tmp_path / "keys", GOOD[:-1])) == [SecretKey(bytes.fromhex(SECRET)).id]


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o620, 0o660, 0o666, 0o644, 0o700, 0o601])
def test_a_file_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "a b", GOOD, mode)
    for action in (key_file.read, key_file.rotate):
        assert f"chmod 600 '{path}'" in refusal(path, action)
    path.chmod(0o400)
    assert len(ids(path)) == 1, "stricter is as good"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, -1)
    assert "belongs to user 12345" in refusal(file)


def test_what_is_no_regular_file_is_refused_at_once(file: Path) -> None:
    fifo, link, directory = (file.with_name(name) for name in ("fifo", "link", "directory"))
    os.mkfifo(fifo, 0o600)
    link.symlink_to(file)
    directory.mkdir(mode=0o600)
    assert "not a regular file" in refusal(fifo)
    assert str(file) in refusal(link) and "link" in refusal(link)
    assert "not a regular file" in refusal(directory)
    assert "not a regular file" in refusal(Path("/dev/null"))
    assert "key new" in refusal(file.with_name("missing"))
    assert "be made" in refusal(file / "under-a-file", key_file.make)


def test_a_change_that_fails_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "write"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            assert "No space" in refusal(file, key_file.rotate)
            assert "No space" in refusal(file.with_name("new"), key_file.make)
        assert file.read_bytes() == before
        assert [path.name for path in file.parent.iterdir()] == ["keys"]
    key_file.rotate(file)


def _rotate(path: Path) -> bytes:
    return key_file.rotate(path).id


def test_changes_at_the_same_time_lose_no_key(file: Path) -> None:
    first = ids(file)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        made = pool.map(_rotate, [file] * 20, chunksize=1)
    assert len(set(made)) == 20 and set(ids(file)) == {*made, *first}
    assert ids(file)[-1:] == first


def test_a_change_waits_for_another_and_gives_up(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "_LOCK_TIMEOUT_S", 0.05)
    fd = key_file._lock(file)
    try:
        assert "another process" in refusal(file, key_file.rotate)
    finally:
        os.close(fd)
    key_file.rotate(file)


def test_settings_become_a_protection(file: Path) -> None:
    assert key_file.protection("checksum", None).method is Method.CHECKSUM
    assert key_file.protection("aes-256-gcm", file).method is Method.AES_256_GCM
    protection = key_file.protection("blake3", file)
    assert protection.new_mark(bytes).key_id == ids(file)[0]
    file.chmod(0o644)
    assert "chmod 600" in refusal(file, lambda path: key_file.protection("blake3", path))
