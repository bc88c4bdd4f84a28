"""What works where only the package itself is installed, and what the rest says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stowage
from stowage.errors import ConfigError
from stowage.extras import EXTRA_OF, absent, require

_ALONE = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(EXTRA_OF)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util, stowage.extras
stowage.extras.find_spec = lambda name: None if name in {sorted(EXTRA_OF)!r} else importlib.util.find_spec(name)
from stowage.cli import main
"""


def alone(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``code`` in a process that finds no package of any extra."""
    environment = {"PYTHONPATH": str(Path(stowage.__file__).parents[1]), "HOME": str(cwd)}
    return subprocess.run(
        [sys.executable, "-c", f"{_ALONE}\n{code}"], env=environment, capture_output=True, text=True, cwd=cwd
    )


def test_what_needs_no_extra_works(tmp_path: Path) -> None:
    """Cache directories and settings are looked after without torch, as beside a server that is not this process."""
    commands = [["config", "show"], ["stats", "."], ["scrub", "."], ["key", "new", "keys"]]
    code = "import io, contextlib\n"
    for words in commands:
        code += f"sys.argv = ['stowage', *{words}]\ntry: main()\nexcept SystemExit as end: print('end', end.code)\n"
    done = alone(code, tmp_path)
    assert "Traceback" not in done.stderr and "not installed" not in done.stderr, done.stderr
    assert done.stdout.count("end 0") == 2 and done.stdout.count("end 2") == 2, done.stdout
    assert done.stderr.count("is not a Stowage cache") == 2


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["run", "x", "-p", "y"], "", "engine"),
        (["plan", "x"], "", "engine"),
        (["tiny", "llama", "y"], "", "engine"),
        (["serve", "x"], "starlette and uvicorn", "server"),
    ],
)
def test_commands_say_which_extra_they_need(words: list[str], module: str, extra: str, tmp_path: Path) -> None:
    done = alone(f"sys.argv = ['stowage', *{words}]\nmain()", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"pip install 'stowage[{extra}]'" in done.stderr and module in done.stderr


def test_python_says_it_too(tmp_path: Path) -> None:
    done = alone("import stowage\nstowage.Engine", tmp_path)
    assert "ConfigError: This needs" in done.stderr and "stowage[engine]" in done.stderr


def test_only_a_missing_package_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that another version of an installed package lacks is a failure like any other."""
    assert absent(ModuleNotFoundError("", name="json.nothing")) is None
    assert absent(ModuleNotFoundError("", name="torch.nothing")) is None
    assert absent(ImportError("no name")) is None
    monkeypatch.setattr("stowage.extras.find_spec", lambda name: None)
    assert "stowage[engine]" in str(absent(ModuleNotFoundError("", name="torch.nn")))
    with pytest.raises(ConfigError, match=r"Keys needs cryptography. Way out: pip install 'stowage\[encryption\]'"):
        require("encryption", "Keys")
