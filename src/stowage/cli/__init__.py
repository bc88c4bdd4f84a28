"""The ``stowage`` command. Thin: each file turns flags into one call below, and its result into text or JSON.

Machine output (``--json``) and generated text go to stdout; progress, summaries and errors go to stderr. Exit status:
0 done, 1 the check that was asked for failed (``verify``, ``doctor``, ``scrub``), 2 wrong use or a ``StowageError``,
130 interrupted, 143 ended by SIGTERM: in order, so what is half written is removed. A second SIGTERM ends at once.
No file here imports torch, transformers or numpy at its top, so ``--help`` answers at once.
"""

import os
import signal
import sys
from collections.abc import Callable


def run_and_exit() -> None:
    """Entry point of the ``stowage`` command: ``main``, and the end of the process."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_in_order())
    try:
        main()
    except SystemExit as done:
        _leave(done.code)
        raise


def main() -> None:
    """Do what ``sys.argv`` asks for. Raises SystemExit, with the status."""
    from stowage import openmp
    from stowage.cli.app import app

    openmp.wait_briefly()
    app()


def _end_in_order() -> Callable[[int, object], None]:
    """What SIGTERM does to this process; to children that are forked from it what it always does."""
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
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):
        return
    os._exit(0 if status is None else status & 0xFF)
