"""Eight threads, one model, signals at random moments, exceptions at any instruction, and hooks that raise: what is
answered is right to the bit, and the model works on.

    make stress FORWARDS=10000     # of each of four placements; a few hundred without
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import stowage
from stowage.executor.determinism.row_invariance import mode_of
from stowage.executor.replay.calls.backend import recorded_steps
from tests.depth import few_or_all
from tests.native import needs_native
from tests.weights.conftest import expectations, logits, run, steps_of

FORWARDS = int(os.environ.get("STOWAGE_TEST_FORWARDS", few_or_all("200", "400")))
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
    """Forwards of a model in any thread, and what became of them. ``compute``: in each thread, what computes one."""

    def __init__(
        self, compute: Callable[[], Callable[[Tensor], Tensor]], wanted: list[Any], interrupter: Interrupter
    ) -> None:
        self.compute, self.wanted, self.interrupter = compute, wanted, interrupter
        self.counts, self.wrong = Counter[str](), list[object]()
        self._left = iter(range(FORWARDS))
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
        mine, computing, logits = threading.get_ident(), self.interrupter.computing, self.compute()
        for _ in left:
            ids, expected = chance.choice(self.wanted)
            try:
                computing[mine] = True
                found = logits(ids)
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


@pytest.fixture
def unraised(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may hit a finalizer, of which nobody is told; and pytest's own report of that, which would fail."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.mark.usefixtures("unraised")
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
            stress = Stress(lambda: partial(logits, model), wanted, interrupter)
            run([lambda seed=seed: stress.job(seed) for seed in range(THREADS)])
    finally:
        for handle in handles:
            handle.remove()
    assert_right(stress, family, before)
    for ids, expected in wanted * 2:
        assert torch.equal(logits(model, ids), expected)
    model.stowage.check()


def assert_right(stress: Stress, family: str, before: set[threading.Thread]) -> None:
    counts, sent = stress.counts, stress.interrupter.sent
    print(f"\n{family}: {FORWARDS:,} forwards, {len(stress.wrong)} wrong; {dict(counts)}, {dict(sent)}")
    assert not stress.wrong, (stress.wrong[:3], counts)
    assert counts["right"] and counts["interrupted"] and sent["signals"]
    assert set(threading.enumerate()) <= before, "a thread was left over"


@needs_native
@pytest.mark.usefixtures("unraised")
def test_interrupts_at_any_moment_of_recorded_steps(placed: tuple[str, Any], plain: Callable[..., Any]) -> None:
    """Steps that are made from lists of calls, by threads of which each has its own lists of the same model."""
    family, model = placed
    tokens = [torch.tensor([token]) for token in (5, 17, 301)]
    wanted = [(token, steps_of(plain(family), None)(token)) for token in tokens]
    lists = [recorded_steps(model, mode_of(model, exact=True), model.stowage) for _ in range(THREADS)]
    free, own = [steps_of(model, each) for each in lists], dict[int, Callable[[Tensor], Tensor]]()
    for step in free:
        assert all(torch.equal(step(token), expected) for token, expected in wanted * 2)
    assert all(each.counters.replayed_steps == 3 for each in lists)

    def compute() -> Callable[[Tensor], Tensor]:
        step = own.setdefault(threading.get_ident(), free[len(own) % THREADS])

        def alone(token: Tensor) -> Tensor:
            while torch._C._len_torch_function_stack():  # an interrupt came while torch left one
                torch._C._pop_torch_function_stack()
            return contextvars.copy_context().run(step, token)

        return alone

    before = set(threading.enumerate())
    with Interrupter(12) as interrupter:
        stress = Stress(compute, wanted, interrupter)
        run([lambda seed=seed: stress.job(seed) for seed in range(THREADS)])
    assert_right(stress, family, before)
    assert sum(each.counters.replayed_steps for each in lists) > FORWARDS // 2
    assert not any(each.why for each in lists)
    for step in free:
        assert all(torch.equal(step(token), expected) for token, expected in wanted)
    model.stowage.check()
