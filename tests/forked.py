"""A child of the test's own process, which has everything that the test has, but no thread."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

_ENDS_S = 30


def exit_code_of_a_child(right: Callable[[], bool]) -> int:
    """0 where ``right`` gives True in a forked child; negative where the child hung and was killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
        child = os.fork()
    if child == 0:
        code = 2
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_ENDS_S)
            code = 0 if right() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
