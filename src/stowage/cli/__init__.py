"""The ``stowage`` command. Thin: each file turns flags into one call below, and its result into text or JSON.

Machine output (``--json``) and generated text go to stdout; progress, summaries and errors go to stderr. Exit status:
0 done, 1 the check that was asked for failed (``verify``, ``doctor``, ``scrub``) or nobody reads stdout, 2 wrong use, a
``StowageError`` or a full disk under stdout, 130 interrupted, 143 ended by SIGTERM, 129 by SIGHUP (its terminal): in
order, so what is half written is removed. A second one ends at once.
No file here imports torch, transformers or numpy at its top, so ``--help`` answers at once.
"""

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable


def run_and_exit() -> None:
    """Entry point of the ``stowage`` command: ``main``, and the end of the process."""
    _replace_closed_streams()
    _print_any_text()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # else it is ignored, as under nohup
            signal.signal(number, _end_in_order())
    try:
        main()
    except SystemExit as done:
        _leave(done.code)
        raise


def _replace_closed_streams() -> None:
    """Where stdin, stdout or stderr were closed (``>&-``) nothing is read, and what is written is lost. No file of ours
    must get their numbers: libraries write to them.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _print_any_text() -> None:
    """Where stdout is not UTF-8 (another locale, PYTHONIOENCODING) a character that it lacks is written as ``\\u2603``:
    a model's answer has whatever it has.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() not in ("utf-8", "utf8"):
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Do what ``sys.argv`` asks for. Raises SystemExit, with the status."""
    try:
        _command()
    except KeyboardInterrupt as interrupt:  # while the commands were imported; they know it themselves later
        raise SystemExit(128 + signal.SIGINT) from interrupt


def _command() -> None:
    from stowage import openmp
    from stowage.cli.app import app
    from stowage.cli.output import complain, stdout_refuses

    openmp.wait_briefly()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not stdout_refuses():
            raise
        if error.errno == errno.EPIPE:  # whoever closed the pipe has seen enough
            raise SystemExit(1) from error
        complain(f"stdout takes no more: {error.strerror}. Write the output somewhere else.")
        raise SystemExit(2) from error


def _end_in_order() -> Callable[[int, object], None]:
    """What such a signal does to this process; to children that are forked from it what it always does."""
    own = os.getpid()

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != own:
            os.kill(os.getpid(), number)
        raise SystemExit(128 + number)

    return end


def _leave(status: object) -> None:
    """End the process without taking apart all modules and what is in them, which takes longer than a short answer.

    What is registered for the end is done, and what was printed is written. Returns where that is left to Python: while
    other threads have something to do, with a message instead of a status, and where the output is closed.
    """
    import atexit
    import threading

    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if not (status is None or type(status) is int) or not all(thread.daemon for thread in others):
        return
    try:
        sys.stdout.flush()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except (OSError, ValueError):
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0 if status is None else status & 0xFF)
