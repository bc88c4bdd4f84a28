"""Structured output: every answer is what was asked for, whatever is computed beside it, and what cannot be compiled is
refused before it reaches the engine's thread.
"""

from __future__ import annotations

import json
import random
import re
import time

import pytest
import torch

from stowage import RequestError, SamplingParams, StructuredOutputs
from stowage.engine.grammar import Grammars
from stowage.engine.logits_processors import processors_of
from stowage.engine.sampling import Sampler
from tests.depth import mostly_rare
from tests.engine.conftest import random_prompt, small_pool

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["ship", "port"]},
        "tons": {"type": "integer", "minimum": 0, "maximum": 999},
        "holds": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "tons", "holds"],
    "additionalProperties": False,
}
WANTED = [
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(json=json.dumps(SCHEMA)),
    StructuredOutputs(regex=r"[A-Z][a-z]{2,5} [0-9]{4}"),
    StructuredOutputs(choice=("Rotterdam", "Le Havre", "a|b (c)", "日本")),
    StructuredOutputs(grammar='start: WORD (", " WORD)~1..3\nWORD: /[a-z]{1,6}/'),
]


@pytest.fixture
def opened(engines):
    return engines("llama", host_memory="16MiB")


def is_as_wanted(wanted: StructuredOutputs, text: str) -> bool:
    if wanted.kind == "regex":
        return re.fullmatch(wanted.text, text) is not None
    if wanted.kind == "choice":
        return text in json.loads(wanted.text)
    if wanted.kind == "grammar":
        return re.fullmatch(r"[a-z]{1,6}(, [a-z]{1,6}){1,3}", text) is not None
    found = json.loads(text)
    assert found.keys() == SCHEMA["properties"].keys() and found["kind"] in ("ship", "port")
    assert isinstance(found["name"], str) and len(found["name"]) <= 12 and 0 <= found["tons"] <= 999
    return len(found["holds"]) <= 3 and all(isinstance(one, bool) for one in found["holds"])


@pytest.mark.parametrize("ignore_eos", mostly_rare([False, True], [False]))
@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: wanted.kind)
def test_every_answer_is_as_it_must_be(wanted, ignore_eos, opened):
    """Of a model that would say anything: random weights, high temperature."""
    prompts = [random_prompt(20 + seed, seed=seed) for seed in range(6)]
    for seed, temperature in ((1, 0.0), (2, 1.0), (3, 5.0)):
        params = SamplingParams(
            400, temperature=temperature, seed=seed, structured_outputs=wanted, ignore_eos=ignore_eos
        )
        for completion in opened.generate(prompts, params):
            assert completion.finish_reason == "stop", completion.text
            assert is_as_wanted(wanted, completion.text), completion.text
    opened.check()


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: wanted.kind)
def test_drawing_without_a_mask_is_drawing_with_one(wanted, opened):
    """A token that counts as allowed is one that the mask leaves; what is drawn is the same, greedily and sampled."""
    eos = frozenset([2])
    grammars = Grammars(opened.tokenizer, opened.parts.layout.vocab, eos)
    chance = torch.Generator().manual_seed(7)
    for seed, temperature in ((1, 0.0), (2, 1.0), (3, 5.0)):
        params = SamplingParams(400, temperature=temperature, seed=seed, structured_outputs=wanted)
        quick, slow = (Sampler(params, (), eos, grammars.begin(wanted)) for _ in range(2))
        unmasked = 0
        while not quick.finished:
            logits = torch.randn(opened.parts.layout.vocab, generator=chance)
            left = slow._processors.apply(logits).isfinite()
            for token in (*left.nonzero()[:20, 0].tolist(), *range(0, len(logits), 37)):
                assert not quick._processors._grammar.allows(token) or left[token]
            logits[left] += chance.initial_seed() * torch.rand((), generator=chance)
            expected = slow._sample_from(slow._processors.apply(logits))
            slow._processors.accept(expected)
            unmasked += quick._processors._grammar.allows(expected)
            assert quick.sample(logits)[0] == expected
            if expected in eos:
                break
        assert unmasked, "no token was drawn without a mask"


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: wanted.kind)
def test_taking_a_token_is_asking_and_then_drawing_it(wanted, opened):
    """Tokens that may not follow leave everything as it was; what one call takes, two calls take."""
    grammars = Grammars(opened.tokenizer, opened.parts.layout.vocab, frozenset([2]))
    chance = random.Random(11)
    vocab = opened.parts.layout.vocab
    refused = 0
    for _ in range(4):
        at_once, in_two = grammars.begin(wanted), grammars.begin(wanted)
        while not in_two.finished:
            masked = torch.zeros(vocab)
            in_two.mask(masked)
            left = masked.isfinite().nonzero()[:, 0].tolist()
            for token in (*chance.sample(range(vocab), 12), chance.choice(left)):
                allowed = in_two.allows(token)
                if allowed:
                    in_two.accept(token)
                assert at_once.try_accept(token) == allowed and at_once.finished == in_two.finished
                refused += not allowed
                if allowed:
                    break
        assert at_once.finished
    assert refused, "no token was refused"


def test_logits_that_nothing_changes_are_not_copied(opened):
    """Nor are they changed where something does: what a request reports are the model's own."""
    wanted = StructuredOutputs(regex="[a-z]{9}")
    begun = Grammars(opened.tokenizer, opened.parts.layout.vocab, frozenset([2])).begin(wanted)
    logits = torch.randn(opened.parts.layout.vocab, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    alone = processors_of(SamplingParams(9, structured_outputs=wanted), (), frozenset([2]), begun)
    assert alone is not None and alone.apply(logits, masked=False) is logits
    biased = SamplingParams(9, min_tokens=3, logit_bias={5: 4.0}, structured_outputs=wanted)
    changed = processors_of(biased, (), frozenset([2]), begun)
    assert changed is not None and changed.apply(logits, masked=False)[5] == before[5] + 4.0
    alone.apply(logits)
    assert torch.equal(logits, before)


def test_any_json_object(opened):
    params = SamplingParams(60, temperature=1.0, seed=5, structured_outputs=StructuredOutputs(json_object=True))
    for completion in opened.generate([random_prompt(20, seed=seed) for seed in range(12)], params):
        assert completion.text.lstrip().startswith("{")
        if completion.finish_reason == "stop":
            assert isinstance(json.loads(completion.text), dict)


@pytest.mark.slow
def test_it_depends_on_the_request_alone_and_changes_nothing_that_is_kept(engines):
    """The same tokens alone, in a batch of others, after preemption; and its prompt is reused by one without."""
    roomy, tight = engines("llama", host_memory="32MiB"), small_pool(engines, "llama", host_memory="32MiB")
    params = SamplingParams(90, temperature=1.5, seed=8, structured_outputs=StructuredOutputs(regex="[a-p]{90}"))
    plain = SamplingParams(60, ignore_eos=True)
    prompts = [random_prompt(66, seed=seed) for seed in range(5)]
    alone = [roomy.generate([one], params)[0].token_ids for one in prompts]
    requests = [tight.submit(one, params if at % 2 else plain) for at, one in enumerate(prompts * 2)]
    assert all(request.wait(120) for request in requests)
    done = [request.result() for request in requests]
    assert sum(one.preemptions for one in done) > 0
    for at, completion in enumerate(done):
        if at % 2:
            assert completion.token_ids == alone[at % 5]
    reused = roomy.generate([prompts[0]], plain)[0]
    assert reused.reused_tokens["device"] == 64
    assert reused.token_ids == engines("llama", host_memory="16MiB").generate([prompts[0]], plain)[0].token_ids


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"json": {"type": "objec"}}, "Invalid type"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": "{"}, "EOF"),
        ({"json": '{"type":"array","items":' * 2000 + "{}" + "}" * 2000}, "recursion"),
        ({"json": {"type": "string", "pattern": "(a"}}, "unclosed"),
        ({"regex": "(a"}, "unclosed"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"choice": ()}, "none of them empty"),
        ({"choice": ("a", 5)}, "texts"),
        ({"json_object": 1}, "true or false"),
        ({"json": {"a": float("nan")}}, "no JSON schema"),
        ({"regex": "x" * (1 << 18) + "y"}, "at most"),
        ({"regex": "a", "json_object": True}, "it has 2"),
        ({}, "it has 0"),
    ],
)
def test_what_cannot_be_compiled_is_refused_at_once(given, words, opened):
    began_s = time.monotonic()
    with pytest.raises(RequestError, match=words) as refused:
        opened.submit([5, 6], SamplingParams(structured_outputs=StructuredOutputs(**given)))
    assert len(str(refused.value)) <= 400 and time.monotonic() - began_s < 20
    assert opened.alive and opened.generate([[5, 6]], SamplingParams(2))[0].token_ids


def test_one_that_is_endless_work_harms_nobody_else(opened):
    """Refused, answered, or ended with its error."""
    other = opened.submit([5, 7], SamplingParams(40, ignore_eos=True))
    for regex in ("(((a{1,999}){1,999}){1,999}){1,999}", "(.*a.*b.*c.*d){40}", "((a|b)*c(a|b){200}){200}"):
        params = SamplingParams(20, structured_outputs=StructuredOutputs(regex=regex))
        try:
            request = opened.submit([5, 6], params)
            assert request.wait(60)
            request.result()
        except RequestError as error:
            assert "simpler" in str(error) or "cannot be used" in str(error)
    assert other.wait(30) and len(other.result().token_ids) == 40
    opened.check()


def test_what_excludes_everything_ends_that_request_alone(opened):
    wanted = StructuredOutputs(regex="")
    one = opened.submit([5, 6], SamplingParams(8, min_tokens=8, structured_outputs=wanted))
    other = opened.submit([5, 7], SamplingParams(20, ignore_eos=True))
    assert one.wait(30) and other.wait(30) and other.result().finish_reason == "length"
    with pytest.raises(RequestError, match="exclude every token together"):
        one.result()


def test_a_model_without_a_tokenizer():
    with pytest.raises(RequestError, match="needs a tokenizer"):
        Grammars(None, 300, frozenset([0])).begin(StructuredOutputs(json_object=True))
