"""Memory that is freed and kept: tensors of some MiB are made again and again without new pages. Each test has an
interpreter of its own, which has freed nothing yet.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import stowage

SOURCE = Path(stowage.__file__).parents[1]
LAYERS = """
import resource, sys, threading
import numpy as np
from stowage.native.memory import keep_freed
if sys.argv[1] == "kept":
    keep_freed()
def layer():
    a = np.ones(5 << 20, np.uint8)
    b = a + 1
    c = a + b
    del a, b
    return c + 1
def compute():
    for _ in range(4):
        layer()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        layer()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
thread = threading.Thread(target=compute)
thread.start()
thread.join()
"""


def faults_per_layer(how: str) -> int:
    """Pages that a layer gets from the system, in a thread as an engine's is: its four arrays have 5,120."""
    run = [sys.executable, "-c", LAYERS, how]
    return int(subprocess.run(run, cwd=SOURCE, capture_output=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other thresholds")
def test_what_a_layer_frees_serves_the_next_one() -> None:
    assert faults_per_layer("kept") < 100
