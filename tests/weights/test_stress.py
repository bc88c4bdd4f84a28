"""Eight threads, one model, signals at random moments, exceptions at any instruction, and hooks that raise: what is
answered is right to the bit, and the model works on.

    make stress FORWARDS=10000     # of each of four placements; a few hundred without
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import stowage
from tests.weights.conftest import expectations, logits, run

FORWARDS = int(os.environ.get("STOWAGE_TEST_FORWARDS", "400"))
THREADS = 8


class Interrupted(BaseException):
    """Comes at any instruction."""


class Raised(Exception):
    """By a hook of a user's."""


class Interrupter:
    """While it is open, threads that compute get exceptions, and this one, which is the main one, signals that raise.
    Other threads get signals too, which end what they wait for in the kernel, and nothing else.
    """

    def __init__(self, seed: int) -> None:
        self.computing: dict[int, bool] = {}
        self.sent = Counter[str]()
        self._chance, self._main, self._over = random.Random(seed), threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._interrupt)

    def __enter__(self) -> Interrupter:
        signal.signal(signal.SIGUSR1, self._handle)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one may still be on its way to a thread that had no processor

    def _handle(self, *_: object) -> None:
        if self._main in self.computing:
            raise Interrupted

    def _interrupt(self) -> None:
        while not self._over.is_set():
            time.sleep(self._chance.random() * 0.02)
            if self._chance.random() < 0.3:
                threads = [self._main, *(t.ident for t in threading.enumerate() if t.ident and t.is_alive())]
                self.sent["signals"] += 1
                signal.pthread_kill(
                    self._main if self._chance.random() < 0.7 else self._chance.choice(threads), signal.SIGUSR1
                )
            elif targets := [each for each in list(self.computing)[:1] if each != self._main]:
                self.sent["exceptions"] += 1
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(targets[0]), ctypes.py_object(Interrupted))


class Stress:
    """Forwards of ``model`` in any thread, and what became of them."""

    def __init__(self, model: Any, wanted: list[Any], interrupter: Interrupter, forwards: int) -> None:
        self.model, self.wanted, self.interrupter = model, wanted, interrupter
        self.counts, self.wrong = Counter[str](), list[object]()
        self._left = iter(range(forwards))
        self._lock = threading.Lock()

    def job(self, seed: int) -> None:
        """A thread's life."""
        chance = random.Random(seed)
        while True:
            try:
                return self._compute(chance, iter(self._next, False))
            except Interrupted:  # it came between two forwards
                self.interrupter.computing.pop(threading.get_ident(), None)

    def _next(self) -> bool:
        with self._lock:
            return next(self._left, None) is not None

    def _compute(self, chance: random.Random, left: Iterator[bool]) -> None:
        mine, computing = threading.get_ident(), self.interrupter.computing
        for _ in left:
            ids, expected = chance.choice(self.wanted)
            try:
                computing[mine] = True
                found = logits(self.model, ids)
                computing.pop(mine, None)
                self.counts["right"] += 1
                if not torch.equal(found, expected):
                    self.wrong.append("other bits")
            except Interrupted:
                self.counts["interrupted"] += 1
            except Raised:
                self.counts["raised by a hook"] += 1
            except stowage.ModelError as error:
                self.counts["told that it was interrupted"] += 1
                if "taken away" not in str(error):
                    self.wrong.append(error)
            except Exception as error:  # noqa: BLE001  # none is right here
                self.wrong.append(error)
            computing.pop(mine, None)
            torch.set_grad_enabled(True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt that hits a finalizer
def test_interrupts_at_any_moment_and_hooks_that_raise(placed: tuple[str, Any], plain: Callable[..., Any]) -> None:
    family, model = placed
    wanted = expectations(plain(family), 3)
    raising = random.Random(7)

    def sometimes(*_: Any) -> None:
        if raising.random() < 0.005:
            raise Raised

    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2].isdigit()]
    handles = [layer.register_forward_hook(sometimes) for layer in layers]
    handles += [layer.register_forward_pre_hook(sometimes, prepend=True) for layer in layers[::2]]
    before = set(threading.enumerate())
    try:
        with Interrupter(11) as interrupter:
            stress = Stress(model, wanted, interrupter, FORWARDS)
            run([lambda seed=seed: stress.job(seed) for seed in range(THREADS)])
    finally:
        for handle in handles:
            handle.remove()
    print(
        f"\n{family}: {FORWARDS:,} forwards, {len(stress.wrong)} wrong; {dict(stress.counts)}, {dict(interrupter.sent)}"
    )
    assert not stress.wrong, (stress.wrong[:3], stress.counts)
    assert stress.counts["right"] and stress.counts["interrupted"] and interrupter.sent["signals"]
    assert set(threading.enumerate()) <= before, "a thread was left over"
    for ids, expected in wanted * 2:
        assert torch.equal(logits(model, ids), expected)
    model.stowage.check()
