"""What is remembered between processes is only ever a saving: a place that takes nothing stops nobody."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from stowage.models.state_directory import Remembered, default_state_directory, put_in_place


def test_a_table_comes_back(tmp_path: Path) -> None:
    known = Remembered(tmp_path / "state" / "table.json")
    known["model"] = "name"
    known.save()
    assert Remembered(tmp_path / "state" / "table.json") == {"model": "name"}
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["table.json"]


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    """Here, as on a file system that is read-only, even the unfinished file cannot be removed."""
    (tmp_path / "state").write_text("mine")
    assert not put_in_place(tmp_path / "state" / "table.json", "{}")
    known = Remembered(tmp_path / "state" / "table.json")
    known["model"] = "name"
    known.save()
    assert (tmp_path / "state").read_text() == "mine"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number that no name belongs to."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not os.path.exists(default_state_directory())
    assert Remembered(default_state_directory() / "table.json") == {}
