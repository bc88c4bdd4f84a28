"""The API through OpenAI's own client: what comes over HTTP is what the engine says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from tests.engine.conftest import random_prompt
from tests.server.process import Server

CLOSE = 2e-4
DOCUMENT = "What is needed first lies on top, and nothing shifts in the holds. " * 5
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def greedy(new_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


def test_models(client: openai.OpenAI, server: Server) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "stowage")
    assert model.max_model_len == 4096
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_greedy_completions_are_the_engines(client: openai.OpenAI, engine: Engine) -> None:
    prompts: list[str | list[int]] = ["A short one", DOCUMENT, random_prompt(200), "Grüße, 日本 ✓"]
    expected = engine.generate(prompts, greedy(24))
    for prompt, completion in zip(prompts, expected, strict=True):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, **GREEDY)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.index) == (completion.text, "length", 0)
        assert choice.logprobs is None and answer.object == "text_completion" and answer.model == "tiny"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (completion.prompt_tokens, 24)
        assert answer.usage.total_tokens == completion.prompt_tokens + 24


@pytest.mark.parametrize("ids", [False, True])
def test_prompts_in_a_batch_come_back_in_order(ids: bool, client: openai.OpenAI, engine: Engine, tokenizer) -> None:
    texts = [f"{n}: {DOCUMENT[: 40 * n]}" for n in range(1, 6)]
    prompts = [tokenizer(text)["input_ids"] for text in texts] if ids else texts
    expected = engine.generate(texts, greedy(9))
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=9, n=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == list(range(10))
    assert [choice.text for choice in answer.choices] == [c.text for c in expected for _ in range(2)]
    assert answer.usage.prompt_tokens == sum(c.prompt_tokens for c in expected), "each prompt counts once"
    assert answer.usage.completion_tokens == 90


def test_greedy_chat_is_the_engines(client: openai.OpenAI, engine: Engine) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": DOCUMENT},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And then?"},
    ]
    (expected,) = engine.generate([messages], greedy(20))
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=20, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (expected.text, "assistant", "length")
    assert answer.usage.prompt_tokens == expected.prompt_tokens and answer.object == "chat.completion"
    parts = [{"type": "text", "text": DOCUMENT[:50]}, {"type": "text", "text": DOCUMENT[50:]}]
    whole = [{"role": "developer", "content": DOCUMENT[:50] + "\n" + DOCUMENT[50:]}]
    one, other = (
        client.chat.completions.create(model="tiny", messages=asked, max_tokens=8, **GREEDY)
        for asked in ([{"role": "system", "content": parts}], whole)
    )
    assert one.choices == other.choices and one.usage.prompt_tokens == other.usage.prompt_tokens


def test_a_chat_without_max_tokens_may_fill_the_context(client: openai.OpenAI) -> None:
    """4,096 tokens are the context; the last token drawn needs no place in it."""
    messages = [{"role": "user", "content": "x" * 4050}]
    answer = client.chat.completions.create(model="tiny", messages=messages, **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 4097


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_whole_answer(chat: bool, n: int, client: openai.OpenAI) -> None:
    options = {"model": "tiny", "max_tokens": 25, "n": n, "seed": 5} | GREEDY | {"temperature": 1.3}
    if chat:
        ask: Callable = client.chat.completions.create
        options |= {"messages": [{"role": "user", "content": DOCUMENT}], "logprobs": True, "top_logprobs": 2}
    else:
        ask, options = client.completions.create, options | {"prompt": DOCUMENT, "logprobs": 2}
    whole = ask(**options)
    chunks = list(ask(**options, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 10 * n and len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 25 * n
    for choice in whole.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + ["length"]
        if chat:
            assert mine[0].delta.role == "assistant"
            assert "".join(part.delta.content or "" for part in mine) == choice.message.content
            logprobs = [item for part in mine if part.logprobs for item in part.logprobs.content]
            assert [item.token for item in logprobs] == [item.token for item in choice.logprobs.content]
        else:
            assert "".join(part.text for part in mine) == choice.text
            assert [t for part in mine for t in part.logprobs.tokens] == choice.logprobs.tokens
            assert [o for part in mine for o in part.logprobs.text_offset] == choice.logprobs.text_offset
    without = list(ask(**options, stream=True))
    assert all(chunk.usage is None for chunk in without)


def test_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def ask(**more: object) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=DOCUMENT, max_tokens=12, n=4, temperature=1.5, **more)
        return [choice.text for choice in answer.choices]

    first = ask(seed=7)
    assert len(set(first)) == 4 and ask(seed=7) == first and ask(seed=-7) != first
    assert ask(seed=8)[:3] == first[1:], "choice i of a seed is choice 0 of the seed i later"
    assert ask() != ask()


def test_choices_of_a_prompt_share_it(client: openai.OpenAI, server: Server) -> None:
    """It is computed once: the others reuse it from the device, and only the first one counts as cached or not."""
    prompt = random_prompt(513, seed=77)
    before = server.total("stowage_tokens_computed_total")
    answers = [client.completions.create(model="tiny", prompt=prompt, max_tokens=2, n=5) for _ in range(2)]
    computed = server.total("stowage_tokens_computed_total") - before
    assert computed < 1.2 * 513
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, 512]
    assert [answer.usage.prompt_tokens for answer in answers] == [513, 513]


def test_stop_texts_and_stop_tokens(client: openai.OpenAI, engine: Engine) -> None:
    (whole,) = engine.generate([DOCUMENT], greedy(30))
    stop = whole.text[10:14]
    asked = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 30}
    for given in (stop, ["never seen", stop]):
        answer = client.completions.create(**asked, stop=given, **GREEDY).choices[0]
        assert (answer.text, answer.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
        streamed = list(client.completions.create(**asked, stop=given, stream=True, **GREEDY))
        assert "".join(chunk.choices[0].text for chunk in streamed) == answer.text
    token = whole.token_ids[5]
    answer = client.completions.create(**asked, temperature=0, extra_body={"stop_token_ids": [token]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == whole.token_ids.index(token) + 1


def test_sampling_parameters_reach_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    sampled = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
    (expected,) = engine.generate([DOCUMENT], greedy(20, seed=11, **sampled))
    extra = {name: sampled.pop(name) for name in ("top_k", "min_p")} | {"ignore_eos": True}
    answer = client.completions.create(
        model="tiny", prompt=DOCUMENT, max_tokens=20, seed=11, extra_body=extra, **sampled
    )
    assert answer.choices[0].text == expected.text


def test_logprobs_of_a_completion(client: openai.OpenAI, engine: Engine, tokenizer) -> None:
    (expected,) = engine.generate([DOCUMENT], greedy(12, logprobs=3))
    for count in (0, 3):
        found = client.completions.create(model="tiny", prompt=DOCUMENT, max_tokens=12, logprobs=count, **GREEDY)
        logprobs = found.choices[0].logprobs
        assert logprobs.token_logprobs == pytest.approx([r.logprob for r in expected.logprobs], abs=CLOSE)
        for top, report in zip(logprobs.top_logprobs, expected.logprobs, strict=True):
            assert len(top) == max(1, count)
            if count:
                assert sorted(top.values(), reverse=True) == pytest.approx([v for _, v in report.top], abs=CLOSE)
        for token, offset, at in zip(logprobs.tokens, logprobs.text_offset, expected.token_ids, strict=True):
            text = tokenizer.decode([at])
            assert token == text or (token.startswith("bytes:\\x") and "\ufffd" in text)
            assert token.startswith("bytes:") or found.choices[0].text[offset:].startswith(("\ufffd", token))


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_beside_special_tokens(stream, client: openai.OpenAI, tokenizer) -> None:
    """Where a text has their names, in the prompt or in the answer, they count; else they do not."""
    user, (letter,) = tokenizer.convert_tokens_to_ids("<user>"), tokenizer("a", add_special_tokens=False)["input_ids"]
    asked = {"model": "tiny", "max_tokens": 3, "logprobs": 1, "echo": True, "temperature": 0, "stream": stream}
    text = "ab<user>c"
    for shows, prompt, written in (
        (True, text, "ab<user>c<user><user><user>"), (False, text, text),
        (False, tokenizer(text)["input_ids"], "abc"), (True, [letter], "a<user><user><user>"),
    ):  # fmt: skip
        more = {"logit_bias": {str(user): 100}, "extra_body": {"ignore_eos": True, "skip_special_tokens": not shows}}
        found = client.completions.create(prompt=prompt, **asked, **more)
        choices = [part.choices[0] for part in found] if stream else found.choices
        assert "".join(choice.text for choice in choices) == written
        names = [name for choice in choices for name in choice.logprobs.tokens]
        offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
        assert names[-3:] == ["<user>"] * 3
        left = written
        for name, offset in reversed(list(zip(names, offsets, strict=True))):
            is_there = left.endswith(name) and (name != "<user>" or offset < len(left))
            assert offset == len(left) - len(name) * is_there
            left = left[:offset]
        assert not left


def test_offsets_behind_half_a_character(client: openai.OpenAI, tokenizer) -> None:
    prompt = tokenizer("né", add_special_tokens=False)["input_ids"][:-1] + tokenizer("ab")["input_ids"]
    (choice,) = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=1, temperature=0
    ).choices
    offsets = dict(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
    assert choice.text == "n\ufffdab"
    assert offsets == {"n": 0, "bytes:\\xc3": 1, "a": 2, "b": 3} | ({"<bos>": 2} if "<bos>" in offsets else {})


def test_logprobs_of_a_chat(client: openai.OpenAI, engine: Engine) -> None:
    messages = [{"role": "user", "content": DOCUMENT}]
    (expected,) = engine.generate([messages], greedy(12, logprobs=4))
    asked = {"model": "tiny", "messages": messages, "max_tokens": 12, "logprobs": True}
    found = client.chat.completions.create(**asked, top_logprobs=4, **GREEDY).choices[0]
    raw = bytes(byte for item in found.logprobs.content for byte in item.bytes)
    assert raw.decode(errors="replace") == found.message.content
    for item, report in zip(found.logprobs.content, expected.logprobs, strict=True):
        assert item.logprob == pytest.approx(report.logprob, abs=CLOSE)
        assert [top.logprob for top in item.top_logprobs] == pytest.approx([v for _, v in report.top], abs=CLOSE)
    plain = client.chat.completions.create(**asked, **GREEDY).choices[0]
    assert [item.token for item in plain.logprobs.content] == [item.token for item in found.logprobs.content]
    assert not any(item.top_logprobs for item in plain.logprobs.content)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_a_prompt(
    max_tokens, stream, client: openai.OpenAI, engine: Engine, tokenizer
) -> None:
    """As lm-eval asks for it, text or tokens, alone or several: the first token has none, the last is the answer."""
    texts = [DOCUMENT[:150], "A short one, é"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    params = greedy(1, logprobs=2, prompt_logprobs=2)
    expected = engine.generate(texts, params)
    asked = {"model": "tiny", "max_tokens": max_tokens, "logprobs": 2, "echo": True, "n": 2} | GREEDY
    for prompt in (texts, ids):
        if stream:
            chunks = list(client.completions.create(**asked, prompt=prompt, stream=True))
            choices = [next(c.choices[0] for c in chunks if c.choices[0].index == index) for index in range(4)]
        else:
            answer = client.completions.create(**asked, prompt=prompt)
            choices = answer.choices
            assert answer.usage.completion_tokens == 4 * max_tokens
        for index, choice in enumerate(choices):
            text, want = texts[index // 2], expected[index // 2]
            assert choice.text == text + (want.text if max_tokens else "")
            logprobs, tokens = choice.logprobs, len(ids[index // 2])
            assert len(logprobs.tokens) == len(logprobs.top_logprobs) == tokens + max_tokens
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            reports = [*want.prompt_logprobs[1:], *want.logprobs[:max_tokens]]
            assert logprobs.token_logprobs[1:] == pytest.approx([r.logprob for r in reports], abs=CLOSE)
            for top, report in zip(logprobs.top_logprobs[1:], reports, strict=True):
                assert max(top.values()) == pytest.approx(report.top[0][1], abs=CLOSE)
                assert len(top) in (2, 3)
            shown = [text[o] if o < len(text) else "" for o in logprobs.text_offset[:tokens]]
            assert all(t.startswith("bytes:") or s == t for t, s in zip(logprobs.tokens, shown, strict=False))


def test_echo_without_logprobs(client: openai.OpenAI, engine: Engine) -> None:
    (expected,) = engine.generate([DOCUMENT], greedy(5))
    asked = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 5, "echo": True} | GREEDY
    assert client.completions.create(**asked).choices[0].text == DOCUMENT + expected.text
    streamed = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == DOCUMENT + expected.text


def test_cached_tokens_and_cache_salt(client: openai.OpenAI) -> None:
    """A salt of its own makes a prompt unknown, to the same client too; the same salt finds it again."""
    prompt = random_prompt(300, seed=78)

    def cached(**extra: str) -> int:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a")] == [
        0,
        256,
        0,
        0,
        256,
    ]


def test_many_at_once(server: Server, engine: Engine) -> None:
    prompts = [f"{n} {DOCUMENT}"[: 20 + 3 * n] for n in range(40)]
    expected = engine.generate(prompts, greedy(6))

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            asked = (client.completions.create(model="tiny", prompt=p, max_tokens=6, **GREEDY) for p in prompts)
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [completion.text for completion in expected]


def test_penalties_and_biases_reach_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    given: dict[str, Any] = {"presence_penalty": 0.7, "frequency_penalty": 0.4}
    beyond = {"repetition_penalty": 1.2, "min_tokens": 9, "ignore_eos": True}
    params = greedy(9, **given, repetition_penalty=1.2, min_tokens=9, logit_bias={7: -100.0, 40: 3.0})
    (expected,) = engine.generate([DOCUMENT], params)
    given |= {"logit_bias": {"7": -100, "40": 3}, "extra_body": beyond}
    answer = client.completions.create(model="tiny", prompt=DOCUMENT, max_tokens=9, temperature=0, **given)
    assert answer.choices[0].text == expected.text != engine.generate([DOCUMENT], greedy(9))[0].text


def test_a_final_message_is_continued(client: openai.OpenAI, engine: Engine, tokenizer) -> None:
    """Without the template's end of turn, and without a new beginning."""
    messages = [{"role": "user", "content": "Say something."}, {"role": "assistant", "content": "Once upon"}]
    body = {"ignore_eos": True, "continue_final_message": True}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body=body
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert text.rstrip().endswith("Once upon")
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.choices[0].message.content == engine.generate([tokens], greedy(8))[0].text
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.chat.completions.create(
            model="tiny", messages=messages, extra_body=body | {"add_generation_prompt": True}
        )
    with pytest.raises(openai.BadRequestError, match="not for the template"):
        reserved = {"chat_template_kwargs": {"chat_template": "x"}}
        client.chat.completions.create(model="tiny", messages=messages, extra_body=reserved)
