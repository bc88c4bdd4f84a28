"""Callbacks, streams and event loops: what one does is its own request's affair. An engine that stops tells all."""

import asyncio
import concurrent.futures
import sys
import threading

import pytest
import torch

from stowage.engine.sampling_params import SamplingParams
from stowage.errors import RequestError, StowageError
from tests.engine.conftest import assert_same, assert_well, greedy, random_prompt

PROMPT = random_prompt(200)
LONG = SamplingParams(max_new_tokens=3000, ignore_eos=True)


def until_idle(engine):
    for _ in range(3000):
        if not engine._loop.open:
            return
        engine._loop.thread.join(0.01)
    pytest.fail("a request that nobody waits for goes on")


@pytest.mark.parametrize("last", [False, True], ids=["first piece", "last piece"])
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), SystemExit(3), concurrent.futures.CancelledError()])
def test_on_delta_that_raises(error, last, engines, references):
    """Its request ends with that, is not asked again, and no other one is affected."""
    engine = engines("llama")
    calls = []

    def on_delta(delta):
        calls.append(delta)
        if delta.completion is not None or not last:
            raise error

    other = engine.submit(random_prompt(60, seed=4), greedy(30))
    request = engine.submit(PROMPT, greedy(5) if last else LONG, on_delta)
    assert request.wait(60) and other.wait(60)
    with pytest.raises(RequestError, match="on_delta raised") as caught:
        request.result()
    assert caught.value.__cause__ is error
    assert len(calls) == (5 if last else 1)
    assert_same(other.result(), references("llama").answer(random_prompt(60, seed=4), 30))
    assert_well(engine, references, "llama", PROMPT)


def test_on_delta_may_compute_with_torch(engines):
    """The engine's thread is in inference mode, whose tensors learn nothing; what it calls is not."""
    made = []
    request = engines("llama").submit(PROMPT, greedy(2), lambda _: made.append(torch.ones(2, requires_grad=True) * 2))
    assert request.wait(60)
    request.result()
    assert made and all(tensor.requires_grad and not tensor.is_inference() for tensor in made)


@pytest.mark.parametrize(
    "wait",
    [
        lambda engine: engine.generate([PROMPT], greedy(1)),
        lambda engine: list(engine.iterate(PROMPT, greedy(1))),
        lambda engine: asyncio.run(first_piece(engine)),
        lambda engine: engine.close(),
    ],
    ids=["generate", "iterate", "stream", "close"],
)
def test_on_delta_that_waits_for_its_own_engine(wait, engines, references):
    """It waited for ever, and so did everybody else. It may submit."""
    engine = engines("llama")
    request = engine.submit(PROMPT, greedy(2), lambda _: wait(engine))
    assert request.wait(60)
    with pytest.raises(RequestError, match="may call submit"):
        request.result()
    followers = []
    assert engine.submit(PROMPT, greedy(2), lambda _: followers.append(engine.submit(PROMPT, greedy(1)))).wait(60)
    assert all(follower.wait(60) for follower in followers)
    assert_well(engine, references, "llama", PROMPT)


async def first_piece(engine):
    async for _ in engine.stream(PROMPT, LONG):
        break


async def too_late(engine):
    stream = engine.stream(PROMPT, LONG)
    await anext(stream)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            async for _ in stream:
                pass


async def never_asked_again(engine, kept):
    kept.append(engine.stream(PROMPT, LONG))
    await anext(kept[-1])


@pytest.mark.parametrize("leave", [first_piece, too_late])
def test_event_loops_that_end_while_a_stream_goes_on(leave, engines, references):
    """Pieces that come for a loop that is closed used to end the engine, and to leave other threads waiting."""
    engine = engines("llama")
    for _ in range(5):
        asyncio.run(leave(engine))
    until_idle(engine)
    assert_well(engine, references, "llama", PROMPT)


def test_an_event_loop_that_is_closed_without_a_word(engines, references):
    """Nobody closes the stream: the request is cancelled all the same."""
    engine, kept = engines("llama"), []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(never_asked_again(engine, kept))
    loop.close()
    until_idle(engine)
    assert_well(engine, references, "llama", PROMPT)
    hooks = sys.unraisablehook
    sys.unraisablehook = lambda _: None  # its loop is closed, so that Python cannot close the stream either
    kept.clear()
    sys.unraisablehook = hooks


def break_down(engine):
    def broken(_work):
        raise ZeroDivisionError("a bug")

    engine.parts.runner.run = broken


def test_an_engine_that_stops_tells_every_waiter(engines):
    """Whatever their callbacks do: raise, block, or call the engine."""
    engine = engines("llama", max_num_seqs=4)
    begun, blocked = threading.Event(), threading.Event()

    def raising(delta):
        begun.set()
        if delta.error is not None:
            raise ZeroDivisionError("mine")

    def blocking(delta):
        if delta.error is not None:
            blocked.wait(60)

    def asking(delta):
        if delta.error is not None:
            engine.generate([PROMPT], greedy(1))

    told = []
    listeners = [raising, blocking, asking, told.append, None]
    requests = [engine.submit(random_prompt(20, seed=n), LONG, listeners[n % 5]) for n in range(40)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        others = [threads.submit(engine.generate, [random_prompt(30, seed=n)], LONG) for n in range(4)]
        assert begun.wait(30)
        break_down(engine)
        for other in others:
            with pytest.raises(StowageError, match="a bug"):
                other.result(10)
    for request in requests:
        assert request.wait(10)
        with pytest.raises(StowageError, match="a bug"):
            request.result()
    engine._loop.thread.join(10)
    for _ in range(1000):
        if sum(delta.error is not None for delta in told) == 8:
            break
        threading.Event().wait(0.01)
    assert sum(delta.error is not None for delta in told) == 8
    with pytest.raises(StowageError, match="stopped"):
        engine.submit(PROMPT, greedy(1))
    blocked.set()
    engine._loop.closing = True


def test_streams_of_an_engine_that_stops_end(engines):
    engine = engines("llama")

    async def read():
        async for _ in engine.stream(PROMPT, LONG):
            break_down(engine)

    with pytest.raises(StowageError, match="a bug"):
        asyncio.run(asyncio.wait_for(read(), 30))
    engine._loop.closing = True


def test_a_model_that_computes_nothing_any_more(engines):
    """Not even what nobody asked for: that is no request's fault, and the engine ends."""
    engine = engines("llama")
    requests = [engine.submit(random_prompt(40, seed=seed), LONG) for seed in range(5)]
    break_down(engine)
    for request in requests:
        assert request.wait(30)
        with pytest.raises(StowageError, match="a bug"):
            request.result()
    engine._loop.thread.join(10)
    assert not engine.alive
    engine._loop.closing = True
