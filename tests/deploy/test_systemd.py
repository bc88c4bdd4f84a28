"""The unit is one that systemd takes, gives the server time to stop, and lets it do what it needs and no more."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stowage.cli.app import app
from stowage.config.settings import SETTINGS
from tests.deploy.conftest import DEPLOY

SYSTEMD = DEPLOY / "systemd"
TEXT = (SYSTEMD / "stowage.service").read_text()
PROGRAM = "/opt/stowage/bin/stowage"
EXPOSURE_MOST = 2.0


def values(directive: str) -> list[str]:
    return re.findall(rf"^{directive}=(.*)$", TEXT, re.MULTILINE)


@pytest.fixture(scope="module")
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    return found


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """With a program that is here."""
    path = tmp_path / "stowage.service"
    path.write_text(TEXT.replace(PROGRAM, sys.executable))
    return path


def test_systemd_takes_it(analyze: str, unit: Path) -> None:
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_directive_that_systemd_does_not_know_would_be_noticed(analyze: str, unit: Path) -> None:
    unit.write_text(unit.read_text().replace("[Service]", "[Service]\nProtectEverything=yes"))
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert "ProtectEverything" in done.stderr


def test_it_is_closed(analyze: str, unit: Path) -> None:
    done = subprocess.run(
        [analyze, "security", "--offline=yes", "--no-pager", str(unit)], capture_output=True, text=True
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd cannot judge a unit that is not installed (older than 250)")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found and float(found[1]) <= EXPOSURE_MOST, done.stdout + done.stderr


def test_it_has_time_to_stop() -> None:
    """Running requests may end, clients are told, and what is held is written."""
    (seconds,) = values("TimeoutStopSec")
    assert float(seconds) >= float(SETTINGS["shutdown_timeout_s"].default) + 4 + 30
    assert values("KillSignal") == ["SIGTERM"]


def test_wrong_use_is_not_tried_again() -> None:
    assert values("Restart") == ["on-failure"] and values("RestartPreventExitStatus") == ["2"]


def test_its_directory_is_the_one_in_the_settings() -> None:
    given = dict(re.findall(r"^#?(\w+)=(.*)$", (SYSTEMD / "stowage.env").read_text(), re.MULTILINE))
    (cache,) = values("CacheDirectory")
    directory = given["STOWAGE_DISK"].rpartition(":")[0]
    assert directory.startswith(f"/var/cache/{cache}/") and values("ProtectSystem") == ["strict"]
    assert f"HF_HOME=/var/cache/{cache}/" in values("Environment")[0]
    known = {f"STOWAGE_{name.upper()}" for name in SETTINGS} | {"STOWAGE_API_KEYS", "STOWAGE_VALKEY_PASSWORD"}
    assert {name for name in given if name.startswith("STOWAGE_")} <= known
    (start,) = values("ExecStart")
    assert start == f"{PROGRAM} serve ${{MODEL}}" and given["MODEL"]
    assert "serve" in [command.name or command.callback.__name__ for command in app.registered_commands]


def test_its_user_is_made() -> None:
    (user,) = values("User")
    assert re.search(rf"^u {user} ", (SYSTEMD / "stowage.sysusers.conf").read_text(), re.MULTILINE)
