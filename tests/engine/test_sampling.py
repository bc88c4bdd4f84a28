"""Sampling, stop conditions, text, streaming and cancellation, as a user sees them."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stowage.engine.detokenizer import Detokenizer
from stowage.engine.logits_processors import processors_of
from stowage.engine.sampling import Sampler
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import RequestError
from tests.depth import mostly_rare
from tests.engine.conftest import greedy, random_prompt, small_pool


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=2.0, top_k=50, top_p=0.9, min_p=0.02),
    ],
)
def test_filters_are_those_of_transformers(params):
    """The distribution is the one that Transformers' own processors give."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 4
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    expected = processors(None, logits[None].clone())[0].softmax(-1)
    found = Sampler(params)._filtered(logits)
    torch.testing.assert_close(found / found.sum(), expected)


def drawn_with(params: SamplingParams, logits: torch.Tensor, prompt: list[int], drawn: list[int]) -> torch.Tensor:
    """The logits that a token is drawn from after these."""
    processors = processors_of(params, prompt, frozenset([0]))
    assert processors is not None
    for token in drawn:
        processors.accept(token)
    before = logits.clone()
    found = processors.apply(logits)
    assert torch.equal(logits, before), "the model's own logits are reported, and must stay"
    return found


def test_penalties_are_those_of_openai_and_transformers():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 4
    prompt, drawn = [5, 7, 7, 9], [9, 20, 20, 21]
    found = drawn_with(SamplingParams(repetition_penalty=1.3), logits, prompt, drawn)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + drawn]), logits[None].clone())[0]
    assert torch.equal(found, expected)
    found = drawn_with(SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25), logits, prompt, drawn)
    counts = torch.bincount(torch.tensor(drawn), minlength=300)
    torch.testing.assert_close(found, logits - 0.5 * (counts > 0) + 0.25 * counts)


def test_biases_and_least_lengths():
    logits = torch.zeros(300)
    found = drawn_with(SamplingParams(logit_bias={4: 2.5, 9: -100}), logits, [], [])
    assert found[4] == 2.5 and found[9] == -100 and found.count_nonzero() == 2
    params = SamplingParams(min_tokens=2, stop_token_ids=(7,))
    for drawn, excluded in (([], [0, 7]), ([7], [0, 7]), ([7, 8], [])):
        assert drawn_with(params, logits, [], drawn).isneginf().nonzero()[:, 0].tolist() == excluded
    never = SamplingParams(min_tokens=2, stop_token_ids=(7, 300, -1))  # what no token is ends nothing
    assert drawn_with(never, logits, [], []).isneginf().nonzero()[:, 0].tolist() == [0, 7]
    ignoring = SamplingParams(min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
    assert drawn_with(ignoring, logits, [], []).isneginf().nonzero()[:, 0].tolist() == [7]
    only_ends = torch.full((300,), -torch.inf)
    only_ends[0] = 1.0
    with pytest.raises(RequestError, match="nothing is left"):
        drawn_with(SamplingParams(min_tokens=1), only_ends, [], [])


def test_stop_strings_count_after_the_least_length():
    class Letters:
        all_special_ids = ()

        def decode(self, tokens, **_):
            return "".join(chr(97 + token) for token in tokens)

    for least, text in ((0, ""), (1, ""), (2, "abc"), (4, "abc"), (5, "abcab"), (9, "abcababab")):
        detokenizer = Detokenizer(Letters(), [], ("ab",), least)
        given = "".join(detokenizer.push(token) for token in [0, 1, 2, 0, 1, 0, 1, 0, 1])
        assert given + detokenizer.finish() == text, least
        assert detokenizer.stopped == (least < 9)


PENALISED = SamplingParams(
    max_new_tokens=24, min_tokens=20, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2,
    logit_bias={3: 4.0, 11: -100.0}, ignore_eos=True,
)  # fmt: skip


@pytest.mark.parametrize("more", mostly_rare([{}, {"temperature": 0.8, "seed": 4}], [{}]))
def test_penalties_depend_on_the_request_alone(engines, more):
    """The same tokens alone, in a batch, with the prefix reused from device and host, and after preemption."""
    params = replace(PENALISED, **more)
    prompt = random_prompt(100)
    first = engines("llama", host_memory="16MiB").generate([prompt], params)[0]
    assert 11 not in first.token_ids and first.token_ids != plain_tokens(engines("llama"), prompt)
    engine = engines("llama", host_memory="16MiB")
    for drop in (False, True):
        if drop:
            engine.drop_device_cache()
        batch = engine.generate([random_prompt(40, seed=1), prompt, random_prompt(70, seed=2)], params)[1]
        assert batch.token_ids == first.token_ids
    assert batch.reused_tokens["host"] > 0
    tight = small_pool(engines, "llama", host_memory="32MiB")
    prompts = [random_prompt(60, seed=seed) for seed in range(3, 8)]
    alone = [engine.generate([one], replace(params, max_new_tokens=90))[0].token_ids for one in prompts]
    together = tight.generate(prompts, replace(params, max_new_tokens=90))
    assert [done.token_ids for done in together] == alone and sum(done.preemptions for done in together)


def plain_tokens(engine, prompt):
    return engine.generate([prompt], greedy(24))[0].token_ids


def test_a_bias_for_a_token_that_is_none(engines):
    with pytest.raises(RequestError, match="outside the model's vocabulary"):
        engines("llama").submit([5], SamplingParams(logit_bias={1 << 40: 1}))


def test_seed_decides_alone(engines):
    """The same seed draws the same tokens alone, in a batch, and with the prefix reused; another seed draws others."""
    engine = engines("llama", host_memory="16MiB")
    prompt = random_prompt(100)
    params = SamplingParams(max_new_tokens=24, temperature=0.8, seed=7, ignore_eos=True)
    first = engine.generate([prompt], params)[0].token_ids
    batch = engine.generate([random_prompt(40, seed=1), prompt, random_prompt(70, seed=2)], params)[1]
    assert batch.token_ids == first
    assert batch.reused_tokens["device"] > 0
    other = SamplingParams(max_new_tokens=24, temperature=0.8, seed=8, ignore_eos=True)
    assert engine.generate([prompt], other)[0].token_ids != first


def test_logprobs(engines, references):
    engine = engines("llama")
    prompt = random_prompt(50)
    params = SamplingParams(max_new_tokens=5, logprobs=3, ignore_eos=True)
    (completion,) = engine.generate([prompt], params)
    with torch.inference_mode():
        logits = references("llama").model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    report = completion.logprobs[0]
    values, ids = logits[-1].topk(3)
    assert [token for token, _ in report.top] == ids.tolist()
    assert [value for _, value in report.top] == pytest.approx(values.tolist(), abs=2e-4)
    assert report.token_id == completion.token_ids[0]


def test_stop_string_cuts_the_text(engines):
    engine = engines("llama")
    prompt = random_prompt(40)
    text = engine.generate([prompt], greedy(40))[0].text
    stop = text[10:14]
    params = SamplingParams(max_new_tokens=40, stop=(stop, "never there"), ignore_eos=True)
    (completion,) = engine.generate([prompt], params)
    assert completion.finish_reason == "stop"
    assert completion.text == text[: text.index(stop)]
    assert len(completion.token_ids) < 40
    pieces = "".join(delta.text for delta in engine.iterate(prompt, params))
    assert pieces == completion.text, "streaming gave away what the stop string took back"


def test_stop_token_and_length(engines):
    engine = engines("llama")
    prompt = random_prompt(40)
    tokens = engine.generate([prompt], greedy(12))[0].token_ids
    (stopped,) = engine.generate([prompt], SamplingParams(max_new_tokens=12, stop_token_ids=(tokens[4],)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    (whole,) = engine.generate([prompt], greedy(12))
    assert whole.finish_reason == "length" and len(whole.token_ids) == 12


def test_stream_gives_the_same_text_and_tokens(engines):
    engine = engines("gemma3")

    async def collect() -> tuple[str, list[int], str]:
        text, tokens, last = "", [], None
        async for delta in engine.stream("The first prompt of all.", greedy(30)):
            text += delta.text
            tokens += delta.token_ids
            last = delta.completion
        return text, tokens, last.text

    async def both() -> list[tuple[str, list[int], str]]:
        return await asyncio.gather(collect(), collect())

    (completion,) = engine.generate("The first prompt of all.", greedy(30))
    for text, tokens, final in asyncio.run(both()):
        assert text == final == completion.text
        assert tokens == completion.token_ids


def test_cancellation_frees_everything(engines):
    engine = engines("llama", max_num_seqs=2)
    long = SamplingParams(max_new_tokens=3000, ignore_eos=True)
    requests = [engine.submit(random_prompt(50, seed=i), long) for i in range(4)]
    time.sleep(0.3)
    for request in requests:
        engine.cancel(request)
    assert all(request.wait(30) for request in requests)
    assert {request.result().finish_reason for request in requests} == {"cancelled"}
    engine.check()
    assert all(pool["used"] == 0 for pool in engine.stats()["pools"])


def test_leaving_a_stream_cancels_it(engines):
    engine = engines("llama")
    for _ in engine.iterate(random_prompt(30), SamplingParams(max_new_tokens=3000, ignore_eos=True)):
        break
    deadline_s = time.monotonic() + 30
    while engine._loop.open and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not engine._loop.open
    engine.check()


def test_chat_template(engines):
    engine = engines("llama")
    messages = [{"role": "user", "content": "Hello"}]
    (chat,) = engine.generate([messages], greedy(8))
    ids = engine.tokenizer("<bos><user>Hello<assistant>", add_special_tokens=False)["input_ids"]
    (plain,) = engine.generate([ids], greedy(8))
    assert chat.token_ids == plain.token_ids and chat.prompt_tokens == len(ids)


def test_text_with_characters_of_several_tokens(engines):
    """Characters that span tokens arrive whole."""
    engine = engines("llama")
    tokenizer = engine.tokenizer
    text = "naïve café 漢字 🚢 end"
    detokenizer = Detokenizer(tokenizer, [], [])
    pieces = [detokenizer.push(token) for token in tokenizer(text)["input_ids"]] + [detokenizer.finish()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_shown_but_for_the_one_that_ends_an_answer(engines):
    engine = engines("llama")
    tokenizer, (prompt,) = engine.tokenizer, [random_prompt(20)]
    letter, end = tokenizer("a", add_special_tokens=False)["input_ids"][-1], min(engine._eos)

    def answered(token, **more):
        params = SamplingParams(max_new_tokens=3, logit_bias={token: 100}, skip_special_tokens=False, **more)
        return engine.generate([prompt], params)[0].text

    name = tokenizer.convert_ids_to_tokens(end)
    assert answered(end) == "" and answered(end, ignore_eos=True) == 3 * name
    assert answered(end, ignore_eos=True, stop_token_ids=(end,)) == ""
    assert answered(letter, stop_token_ids=(letter,)) == "a"  # as where special tokens are left out


@pytest.mark.parametrize("silent", [None, frozenset[int]()])
def test_text_is_what_the_tokenizer_decodes(engines, silent):
    """It is asked of the tokenizer's backend, but not where a class decodes in another way."""
    tokenizer, chance = engines("llama").tokenizer, random.Random(5)
    for _ in range(20):
        tokens = [chance.randrange(len(tokenizer)) for _ in range(12)]
        detokenizer = Detokenizer(tokenizer, [], [], silent=silent)
        pieces = [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]
        assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=silent is None)

    class Own(type(tokenizer)):
        def _decode(self, *args, **named):
            return super()._decode(*args, **named).upper()

    own = Own(tokenizer_object=tokenizer.backend_tokenizer)
    detokenizer = Detokenizer(own, [], [])
    assert detokenizer.push(tokenizer("a")["input_ids"][-1]) + detokenizer.finish() == "A"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5},
        {"top_k": -1}, {"min_p": 1.0}, {"logprobs": 1000}, {"stop": "text"}, {"stop": ("",)}, {"seed": -1},
        {"stop": [None]}, {"stop": (b"x",)}, {"stop": b"x"}, {"stop": 5}, {"stop": None}, {"stop": ["a", 1]},
        {"stop_token_ids": 5}, {"stop_token_ids": "ab"}, {"stop_token_ids": [1.5]}, {"stop_token_ids": [None]},
        {"stop_token_ids": [True]}, {"temperature": "x"}, {"temperature": None}, {"temperature": True},
        {"temperature": 10**400}, {"temperature": [1.0]}, {"temperature": 1j}, {"top_p": "0.5"}, {"min_p": {}},
        {"top_k": 1.5}, {"top_k": "4"}, {"top_k": 1 << 80}, {"max_new_tokens": "9"}, {"max_new_tokens": None},
        {"max_new_tokens": 2.0}, {"seed": "x"}, {"seed": 1 << 63}, {"logprobs": None}, {"prompt_logprobs": "1"},
        {"prompt_logprobs_from": None}, {"ignore_eos": "no"}, {"ignore_eos": None}, {"max_new_tokens": 10**5000},
    ],
)  # fmt: skip
def test_parameters_out_of_range(wrong):
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_parameters_of_numpy_and_lists_are_taken():
    found = SamplingParams(
        max_new_tokens=np.int64(3), temperature=np.float32(0.5), stop=["a", "b"], stop_token_ids={7}, seed=np.int32(4)
    )
    assert found == SamplingParams(max_new_tokens=3, temperature=0.5, stop=("a", "b"), stop_token_ids=(7,), seed=4)


def test_the_queue_has_a_limit(engines, monkeypatch):
    from stowage.engine import loop as module

    monkeypatch.setattr(module, "REQUESTS_MAX", 3)
    engine = engines("llama")
    long = SamplingParams(max_new_tokens=3000, ignore_eos=True)
    requests = [engine.submit(random_prompt(10, seed=i), long) for i in range(3)]
    with pytest.raises(RequestError, match="3 requests are open"):
        engine.submit(random_prompt(10), long)
    for request in requests:
        engine.cancel(request)
    assert all(request.wait(30) for request in requests)
    assert len(engine.generate([random_prompt(10)], greedy(2))[0].token_ids) == 2
