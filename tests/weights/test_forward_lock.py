"""Many threads, one model, and whatever may end a forward: right bits or a clear error, and the model works on."""

from __future__ import annotations

import _thread
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stowage
from stowage.weights.forward_lock import ForwardLock
from tests.weights.conftest import expectations, logits, prompt, run

FORWARDS, THREADS = 400, 8


class Interrupted(BaseException):
    """Comes at any instruction."""


def test_threads_take_turns_and_are_right(placed: tuple[str, Any], plain: Callable[..., Any]) -> None:
    family, model = placed
    wanted = expectations(plain(family))
    wrong: list[object] = []

    def compute(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(FORWARDS // (4 * THREADS)):
            ids, expected = chance.choice(wanted)
            try:
                if not torch.equal(logits(model, ids), expected):
                    wrong.append("other bits")
            except Exception as error:  # noqa: BLE001  # none is right here
                wrong.append(error)

    run([lambda seed=seed: compute(seed) for seed in range(THREADS)])
    assert not wrong
    model.stowage.check()


def test_texts_of_two_threads_are_those_of_one(placed: tuple[str, Any], plain: Callable[..., Any]) -> None:
    family, model = placed
    asked = [prompt(4, 1), prompt(9, 2)]
    expected = [plain(family).generate(ids, max_new_tokens=12, do_sample=False) for ids in asked]
    found: list[Any] = [None, None]

    def write(at: int) -> None:
        found[at] = model.generate(asked[at], max_new_tokens=12, do_sample=False)

    run([lambda at=at: write(at) for at in range(2)])
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt that hits the collector
def test_ctrl_c_ends_a_forward_and_nothing_else(placed: tuple[str, Any], plain: Callable[..., Any]) -> None:
    """By real signals, at random moments: the mode of gradients is as it was, and the next forward is right."""
    family, model = placed
    ids = prompt()
    expected = logits(plain(family), ids)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    chance = random.Random(3)
    interrupted = 0
    try:
        for _ in range(FORWARDS // 10):
            timer = threading.Timer(chance.random() * 0.012, lambda: _thread.interrupt_main(signal.SIGINT))
            try:
                timer.start()
                for _ in range(20):
                    found = model(input_ids=ids, use_cache=False).logits
                    assert torch.equal(found, expected)
                timer.join()
                time.sleep(0)
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            assert torch.is_grad_enabled()
            assert torch.equal(logits(model, ids), expected)
    except KeyboardInterrupt:  # late: between two rounds
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted
    assert torch.equal(logits(model, ids), expected)
    model.stowage.check()


def test_a_forward_that_never_ended_holds_nobody_up(
    checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    """A thread that is gone, and an interrupt whose traceback somebody keeps."""
    model = stowage.offload(checkpoints("llama"), weights="*=stream")

    def stop(*_: Any) -> None:
        raise Interrupted

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    kept: list[BaseException] = []

    def die() -> None:
        try:
            logits(model, prompt())
        except Interrupted as error:
            kept.append(error)

    run([die])
    die()
    handle.remove()
    assert len(kept) == 2
    assert torch.equal(logits(model, prompt()), logits(plain("llama"), prompt()))


def test_a_forward_inside_of_a_forward_is_told(checkpoints: Callable[..., Path], plain: Callable[..., Any]) -> None:
    model = stowage.offload(checkpoints("llama"), weights="*=stream")
    handle = model.model.layers[0].register_forward_hook(lambda *_: logits(model, prompt()) and None)
    with pytest.raises(stowage.ModelError, match="inside of another"):
        logits(model, prompt())
    handle.remove()
    closing = model.model.layers[0].register_forward_hook(lambda *_: model.stowage.close())
    with pytest.raises(stowage.ModelError, match="inside of another"):
        logits(model, prompt())
    closing.remove()
    assert torch.equal(logits(model, prompt()), logits(plain("llama"), prompt()))


def test_a_turn_that_does_not_come_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stowage.weights.forward_lock.LOCK_TIMEOUT_S", 0.2)
    lock = ForwardLock()
    inside, over = threading.Event(), threading.Event()

    def hold() -> None:
        lock.acquire(sys._getframe())
        inside.set()
        over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    with pytest.raises(stowage.ModelError, match="has not ended"):
        lock.acquire(sys._getframe())
    lock.waits = False
    with pytest.raises(stowage.ModelError, match="two forwards"):
        lock.acquire(sys._getframe())
    over.set()
    holder.join()
    claim = lock.acquire(sys._getframe())  # of a thread that is gone without a word
    assert lock.held() is claim
    lock.release(claim)
    assert lock.held() is None
