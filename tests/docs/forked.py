"""`stowage` and `python` that start in a moment: forked from a process that has imported everything.

Documentation has dozens of commands, and each would spend nine seconds importing torch. `Forge` starts that process and
writes two programs into a directory for PATH. They hand over their arguments, directory, environment and standard
streams; a fork with these is what runs. Signals are passed on; the status comes back.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
MESSAGE_BYTES: Final = 1 << 17

PROGRAM: Final = """#!{python} -SE
import array, json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
connection.connect({path!r})
told = json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
connection.sendmsg([told], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
pid = int(connection.recv(64))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda given, frame: os.kill(pid, given))
sys.exit(int(connection.recv(64)))
"""


def serve(path: str) -> None:
    """The process with everything imported: one fork watches each connection, and forks the program itself. When
    standard input ends, who started it is gone, however that ended: it goes too, with all of its forks.
    """
    for name in ("torch", "transformers", "stowage.cli.app", "stowage.engine.engine", "stowage.server.serve"):
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        if 0 in select.select([listener, 0], [], [])[0]:
            os.killpg(0, signal.SIGKILL)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _watch(connection)
            os._exit(0)
        connection.close()


def _watch(connection: socket.socket) -> None:
    told, extra, *_ = connection.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i", extra[0][2]).tolist()
    name, arguments, directory, environment = json.loads(told)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 64)
        os._exit(_play(name, arguments, directory, environment))
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(OSError):  # whoever asked may be gone
        connection.send(str(child).encode())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(str(code if code >= 0 else 128 - code).encode())


def _play(name: str, arguments: list[str], directory: str, environment: dict[str, str]) -> int:
    """Be that program."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, mode in enumerate("rww"):
        setattr(sys, ("stdin", "stdout", "stderr")[number], os.fdopen(number, mode))
    try:
        if name == "stowage":
            sys.argv = ["stowage", *arguments]
            importlib.import_module("stowage.cli").main()
        elif arguments[:1] == ["-m"]:
            sys.argv = arguments[1:]
            _run(_main_of(arguments[1]))
        else:
            sys.argv = arguments
            _run(arguments[0])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except BaseException:  # noqa: BLE001 - the outermost frame of a process
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    return 0


def _main_of(package: str) -> str:
    spec = importlib.util.find_spec(f"{package}.__main__")
    assert spec is not None and spec.origin is not None
    return spec.origin


def _run(path: str) -> None:
    """As the interpreter runs a file."""
    spec = importlib.util.spec_from_file_location("__main__", path)
    assert spec is not None and spec.loader is not None
    sys.modules["__main__"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


class Forge:
    """The process, and `programs`: the directory for PATH. Ends with its `with` block, and its forks with it."""

    def __init__(self, directory: Path) -> None:
        self.programs = directory / "programs"
        self.programs.mkdir()
        path = str(directory / "forge")
        for name in ("stowage", "python"):
            program = self.programs / name
            program.write_text(PROGRAM.format(python=sys.executable, path=path))
            program.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.docs.forked import serve; serve({path!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def __enter__(self) -> Forge:
        return self

    def __exit__(self, *_: Any) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
