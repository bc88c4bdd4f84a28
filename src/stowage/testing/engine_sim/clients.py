"""What clients do to an engine: ask, listen, leave in the middle, close their event loops, raise, and give nonsense.

Every answer is compared with what must come. A request that nobody hurt must be answered, and whoever waits is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any, Final

from stowage.engine.request import Completion, Delta, Request
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import BudgetError, RequestError, StowageError
from stowage.testing.engine_sim.engine import PlayedEngine
from stowage.testing.engine_sim.model import DRAWN_MAX, RAISES, SAYS_NAN, Answer, answer, prompt_logprobs
from stowage.testing.engine_sim.profile import EngineFaults
from stowage.testing.sim.content import Violation
from stowage.testing.sim.loop import Loop

TOLD_S: Final = 900.0
"""Far more than any request takes, with every tier hanging."""
NONSENSE: Final[tuple[Any, ...]] = (
    [],
    [VALUE := -1],
    [1 << 70],
    ["a"],
    None,
    3.5,
    {"role": "user"},
    [{"role": "user"}],
    [1.5],
    [True] * 3 + [VALUE],
)
ODD_PARAMS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": float("nan")},
    {"temperature": -1},
    {"temperature": "x"},
    {"top_p": 0},
    {"stop": [None]},
    {"stop": (b"x",)},
    {"stop_token_ids": 5},
    {"max_new_tokens": 0},
    {"max_new_tokens": 1 << 80},
    {"seed": -1},
    {"logprobs": 51},
    {"min_tokens": 200},
    {"presence_penalty": 3},
    {"repetition_penalty": 0},
    {"logit_bias": {"5": 1}},
    {"logit_bias": {5: float("nan")}},
)
EXTREME: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 1e-38, "seed": 1},
    {"temperature": 1e300, "seed": 2},
    {"temperature": 1.0, "top_p": 1e-40, "seed": 3},
    {"temperature": 0.7, "top_k": 1, "seed": 4},
    {"temperature": 0.9, "min_p": 0.999999, "seed": 5},
    {"temperature": 1.0, "top_k": 1 << 60, "seed": 2**63 - 1},
)
RAISED: Final[tuple[type[BaseException], ...]] = (
    ValueError,
    RuntimeError,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
)


class Documents:
    """Prompts that share beginnings."""

    def __init__(self, chance: random.Random, longest: int) -> None:
        self._chance = chance
        self._longest = longest
        self._known = [self._words(longest) for _ in range(2)]

    def _words(self, count: int) -> list[int]:
        return [self._chance.randrange(1, DRAWN_MAX) for _ in range(count)]

    def draw(self) -> list[int]:
        base = self._chance.choice(self._known)
        lengths = [self._chance.randrange(1, len(base) + 1) for _ in range(2)]
        tokens = base[: self._chance.choice((min(lengths), max(lengths)))]
        tokens = tokens + self._words(self._chance.choice((0, 0, 1, 5, 20)))
        return tokens[: self._longest]

    def learn(self, tokens: list[int]) -> None:
        """A conversation goes on from here."""
        if len(tokens) < self._longest:
            self._known.append(tokens)


class Client:
    """Asks `count` times, one request after another. One `run` is a task's work."""

    def __init__(
        self,
        loop: Loop,
        engine: PlayedEngine,
        faults: EngineFaults,
        documents: Documents,
        happened: Counter[str],
        count: int,
    ) -> None:
        self._loop, self._engine, self._faults = loop, engine, faults
        self._documents, self._happened, self._left = documents, happened, count
        self.done = False

    def run(self) -> None:
        """Until all requests have ended, or the engine has."""
        acts = (
            self._ask,
            self._ask,
            self._ask,
            self._listen,
            self._leave,
            self._raise,
            self._stream,
            self._nonsense,
            self._look,
            self._look,
        )
        while self._left and self._engine.alive:
            self._left -= 1
            self._loop.sleep(self._loop.chance.random() * self._loop.chance.choice((0.001, 0.05, 0.5)))
            with contextlib.suppress(_EngineOver):
                self._loop.chance.choice(acts)()
        self.done = True

    # what is asked

    def _prompt(self) -> list[int]:
        prompt, chance = self._documents.draw(), self._loop.chance
        if chance.random() < 0.04:
            prompt[chance.randrange(len(prompt))] = chance.choice((SAYS_NAN, RAISES))
        return prompt

    def _params(self) -> SamplingParams:
        chance = self._loop.chance
        given: dict[str, Any] = {
            "max_new_tokens": chance.choice((1, 2, 8, 30, 300)),
            "ignore_eos": chance.random() < 0.3,
        }
        if chance.random() < 0.4:
            given |= {"temperature": chance.choice((0.3, 1.0)), "seed": chance.randrange(1 << 30)}
        if chance.random() < 0.1:
            given |= chance.choice(EXTREME)
        if chance.random() < 0.2:
            given["stop"] = tuple(chance.choice("BCDEFGHIJ") + chance.choice(("", "K", "LM")) for _ in range(2))
        if chance.random() < 0.1:
            given["stop_token_ids"] = (chance.randrange(DRAWN_MAX),)
        if chance.random() < 0.15:
            given |= {"presence_penalty": chance.choice((0, 0.5, 2)), "frequency_penalty": chance.choice((0, 0.3, -1))}
        if chance.random() < 0.1:
            given["repetition_penalty"] = chance.choice((0.8, 1.3))
        if chance.random() < 0.1:
            given["min_tokens"] = chance.randrange(given["max_new_tokens"] + 1)
        if chance.random() < 0.1:
            given["logit_bias"] = {chance.randrange(DRAWN_MAX): chance.choice((-100, 3, 5.5)) for _ in range(3)}
        if chance.random() < 0.15:
            given["logprobs"] = chance.choice((1, 3))
        if chance.random() < 0.1:
            given |= {"prompt_logprobs": chance.choice((0, 2)), "prompt_logprobs_from": chance.choice((0, 0, 7, 500))}
        return SamplingParams(**given)

    def _submit(self, prompt: list[int], params: SamplingParams, on_delta: Any = None) -> Request | None:
        """None: it was refused, as it had to be."""
        engine = self._engine
        room = engine.parts.layout.context_tokens - len(prompt) + 1
        length = len(prompt) + min(params.max_new_tokens, room) - 1
        try:
            request = engine.submit(prompt, params, on_delta, salt=self._loop.chance.choice(("", "", "tenant")))
        except BudgetError:
            if length <= engine.sequence_tokens_max:
                raise Violation(f"{length} tokens are refused, and {engine.sequence_tokens_max} fit") from None
            self._happened["refused: too long"] += 1
            return None
        except StowageError:
            if engine.alive:
                raise
            raise _EngineOver from None
        if length > engine.sequence_tokens_max:
            raise Violation(f"{length} tokens are taken, and {engine.sequence_tokens_max} fit")
        return request

    def _until_told(self, request: Request) -> None:
        until_s = self._loop.now_s + TOLD_S
        while not request.done:
            if self._loop.now_s > until_s:
                raise Violation(f"request {request.id} is not told in {TOLD_S:.0f} s")
            self._loop.sleep(0.02)

    def _excused(self, request: Request) -> bool:
        return request.id in self._engine.computes.excused or self._engine.computes.broken

    # what they do

    def _ask(self) -> None:
        prompt, params = self._prompt(), self._params()
        request = self._submit(prompt, params)
        if request is not None:
            self._until_told(request)
            self._judge(request, prompt, params)

    def _listen(self) -> None:
        """The pieces together are the completion."""
        prompt, params = self._prompt(), self._params()
        pieces: list[Delta] = []
        request = self._submit(prompt, params, pieces.append)
        if request is None:
            return
        self._until_told(request)
        if not self._engine.failed:
            self._judge_pieces(request, pieces)
        self._judge(request, prompt, params)

    def _leave(self) -> None:
        """Cancelled at any moment: what was generated is right as far as it goes."""
        prompt, params = self._prompt(), self._params()
        request = self._submit(prompt, params)
        if request is None:
            return
        self._loop.sleep(self._loop.chance.random() * self._loop.chance.choice((0.0, 0.01, 0.3)))
        self._engine.cancel(request)
        self._until_told(request)
        self._judge(request, prompt, params, left=True)

    def _raise(self) -> None:
        """`on_delta` raises, whatever it may be, and harms nobody else."""
        prompt, params, chance = self._prompt(), self._params(), self._loop.chance
        after, kind = chance.randrange(6), chance.choice(RAISED)
        count = 0

        def on_delta(_: Delta) -> None:
            nonlocal count
            count += 1
            if count > after:
                self._faults.struck["callback_raises"] += 1
                raise kind("a callback")

        request = self._submit(prompt, params, on_delta)
        if request is None:
            return
        self._until_told(request)
        if count <= after:
            self._judge(request, prompt, params)
        elif request.error is None:
            raise Violation("on_delta raised, and its request has no error")

    def _stream(self) -> None:
        """`async for` on an event loop that may be left, cancelled or closed at any moment."""
        prompt, params, chance = self._prompt(), self._params(), self._loop.chance
        events = asyncio.new_event_loop()
        events.set_exception_handler(lambda *_: None)
        pieces: list[Delta] = []
        most = chance.choice((1, 3, 1000))
        turns = chance.choice((1, 2, 10, 100_000))

        async def listen() -> None:
            async for piece in self._engine.stream(prompt, params):
                pieces.append(piece)
                if len(pieces) >= most:
                    break

        listening = listen()
        task = events.create_task(listening)
        until_s = self._loop.now_s + TOLD_S
        try:
            while not task.done() and turns:
                turns -= 1
                events.call_soon(events.stop)
                events.run_forever()
                self._loop.sleep(0.01)
                if self._loop.now_s > until_s:
                    raise Violation("a stream is not told")
            self._end_stream(task, pieces, prompt, params, most)
            if task.done():
                events.run_until_complete(events.shutdown_asyncgens())
        finally:
            events.close()
            with contextlib.suppress(RuntimeError):  # of Python's own queue: "Event loop is closed"
                listening.close()  # as garbage collection does, later

    def _end_stream(
        self, task: asyncio.Task[None], pieces: list[Delta], prompt: list[int], params: SamplingParams, most: int
    ) -> None:
        if not task.done():
            self._happened["event loops closed"] += 1
            return
        error = task.exception()
        if error is not None:
            if not isinstance(error, StowageError):
                raise Violation(f"a stream raised {error!r}") from error
            return
        if len(pieces) >= most:
            self._happened["streams left"] += 1
        elif pieces and pieces[-1].completion is not None:
            self._compare(pieces[-1].completion, prompt, params)

    def _nonsense(self) -> None:
        chance = self._loop.chance
        try:
            if chance.random() < 0.5:
                SamplingParams(**chance.choice(ODD_PARAMS))
            else:
                self._engine.submit(chance.choice(NONSENSE))
        except (RequestError, BudgetError):
            self._happened["nonsense refused"] += 1
        except StowageError:
            if self._engine.alive:
                raise
        else:
            raise Violation("nonsense was taken")

    def _look(self) -> None:
        """What operators do, from other threads."""
        engine, chance = self._engine, self._loop.chance
        self._happened["looked at"] += 1
        if chance.random() < 0.5:  # so that the next prefix comes from host memory, or from a tier
            engine.drop_device_cache()
            if chance.random() < 0.7:
                engine.drop_host()
        chance.choice((engine.stats, engine.check, engine.forget_costs))()

    # judging

    def _judge(self, request: Request, prompt: list[int], params: SamplingParams, *, left: bool = False) -> None:
        try:
            completion = request.result()
        except StowageError as error:
            self._judge_error(request, prompt, error, left)
            return
        if completion.finish_reason == "cancelled" and not left and self._engine.alive:
            raise Violation("a request was cancelled, and nobody asked for it")
        self._compare(completion, prompt, params)

    def _judge_error(self, request: Request, prompt: list[int], error: StowageError, left: bool) -> None:
        if self._excused(request):
            self._happened["errors that were due"] += 1
        elif SAYS_NAN in prompt and "not numbers" in str(error):
            self._happened["NaN: told"] += 1
        elif RAISES in prompt and "cannot be computed" in str(error):
            self._happened["culprits: told"] += 1
        elif "could not be copied" in str(error) and self._faults.struck["copy_out_fails"]:
            self._happened["errors that were due"] += 1
        else:
            raise Violation(f"request {request.id} failed: {error!r}")

    def _judge_pieces(self, request: Request, pieces: list[Delta]) -> None:
        last = pieces[-1] if pieces else None
        if last is None or (last.completion is None and last.error is None):
            raise Violation("a listener was not told the end")
        if last.completion is not None:
            together = [token for piece in pieces for token in piece.token_ids]
            if together != last.completion.token_ids or "".join(p.text for p in pieces) != last.completion.text:
                raise Violation("the pieces are not the completion")

    def _compare(self, completion: Completion, prompt: list[int], params: SamplingParams) -> None:
        room = self._engine.parts.layout.context_tokens - len(prompt) + 1
        due = answer(prompt, params, room)
        got, reason = completion.token_ids, completion.finish_reason
        if reason == "cancelled":
            self._happened["cancelled"] += 1
            if got != due.tokens[: len(got)]:
                raise Violation("wrong tokens in a cancelled answer")
            return
        if (SAYS_NAN in prompt or RAISES in prompt) and not self._engine.computes.broken:
            raise Violation("a prompt that cannot be computed was answered")
        self._compare_whole(completion, due, prompt, params)
        self._happened["answers"] += 1
        self._happened["tokens reused"] += sum(completion.reused_tokens.values())
        if reason != "cancelled":
            self._documents.learn([*prompt, *got])

    def _compare_whole(self, completion: Completion, due: Answer, prompt: list[int], params: SamplingParams) -> None:
        same = (
            (completion.token_ids, due.tokens, "tokens"),
            (completion.finish_reason, due.reason, "reason"),
            (completion.text, due.text, "text"),
            (completion.logprobs, due.logprobs if params.logprobs else None, "log-probabilities"),
            (completion.prompt_logprobs, prompt_logprobs(prompt, params), "log-probabilities of the prompt"),
        )
        for got, wanted, what in same:
            if got != wanted:
                raise Violation(f"wrong {what}: {got!r} instead of {wanted!r}")


class _EngineOver(Exception):
    """It takes no more requests."""
