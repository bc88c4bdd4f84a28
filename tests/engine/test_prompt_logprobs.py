"""Log-probabilities of the prompt: those of plain Transformers, however the prompt was cut, cached or preempted."""

from dataclasses import replace

import pytest
import torch

from stowage.engine import scheduler
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import RequestError
from tests.depth import mostly_rare
from tests.engine.conftest import LOGPROB_BOUND, random_prompt

SCORE = SamplingParams(max_new_tokens=1, prompt_logprobs=3, ignore_eos=True)


def assert_scored(completion, reference, prompt, first=1):
    """Every position from ``first`` on has the model's own log-probabilities, likeliest first; none before has any."""
    with torch.inference_mode():
        expected = reference.model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    reports = completion.prompt_logprobs
    assert len(reports) == len(prompt) and reports[:first] == [None] * first
    for position in range(first, len(prompt)):
        report, row = reports[position], expected[position - 1]
        assert report.token_id == prompt[position]
        assert report.logprob == pytest.approx(float(row[prompt[position]]), abs=LOGPROB_BOUND)
        assert len(report.top) == 3
        assert [value for _, value in report.top] == pytest.approx(row.topk(3).values.tolist(), abs=LOGPROB_BOUND)
        assert all(value == pytest.approx(float(row[token]), abs=LOGPROB_BOUND) for token, value in report.top)


@pytest.mark.parametrize(
    "family",
    mostly_rare(
        ["llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "nemotron_h"], ["llama", "gemma3", "nemotron_h"]
    ),
)
def test_of_every_kind_of_model_in_pieces_and_cached(family, engines, references):
    """300 tokens in steps of 64; again when all of them are cached; and what was computed for it serves others."""
    engine = engines(family, host_memory="32MiB", max_num_batched_tokens=64, snapshot_tokens=128)
    prompt = random_prompt(300)
    for _ in range(2):
        (completion,) = engine.generate([prompt], SCORE)
        assert not any(completion.reused_tokens.values())
        assert_scored(completion, references(family), prompt)
    (plain,) = engine.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
    assert plain.reused_tokens["device"] >= 256 and plain.prompt_logprobs is None


@pytest.mark.parametrize(("first", "reused"), [(0, 0), (1, 0), (2, 0), (65, 64), (128, 112), (129, 128), (200, 192)])
def test_only_what_lies_before_may_come_from_a_cache(first, reused, engines, references):
    engine = engines("llama")
    prompt = random_prompt(200)
    engine.generate([prompt], replace(SCORE, prompt_logprobs=None))
    (completion,) = engine.generate([prompt], replace(SCORE, prompt_logprobs_from=first))
    assert sum(completion.reused_tokens.values()) == reused
    assert_scored(completion, references("llama"), prompt, max(1, first))


def test_logits_of_a_long_prompt_are_never_held_together(engines, references, monkeypatch):
    """Three prompts at once, in steps that could take them whole: no step has more logits than the limit, and a
    request that wants none is not held up by it.
    """
    monkeypatch.setattr(scheduler, "LOGITS_BYTES_MAX", 40 * 512 * 4)
    engine = engines("llama", max_num_batched_tokens=512)
    rows, work = [], []
    run = engine.parts.runner.run

    def seen(items):
        outputs = run(items)
        rows.append(sum(len(o) for o, item in zip(outputs, items, strict=True) if item.every_logit))
        work.extend(item.count for item in items if not item.every_logit)
        return outputs

    engine.parts.runner.run = seen
    prompts = [random_prompt(150, seed=n) for n in range(3)]
    requests = [engine.submit(prompt, SCORE) for prompt in prompts]
    plain = engine.submit(random_prompt(300, seed=9), replace(SCORE, prompt_logprobs=None))
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.wait(60)
        assert_scored(request.result(), references("llama"), prompt)
    assert plain.wait(60) and max(work) > 100
    assert max(rows) == 40 and sum(rows) == 450


@pytest.mark.parametrize("family", ["llama", "nemotron_h"])
@pytest.mark.parametrize("host", ["32MiB", 0])
def test_preempted_while_it_is_scored(family, host, engines, references):
    """In the middle of its prompt it loses the device: it comes back from host memory, or is computed again."""
    engine = engines(family, host_memory=host, snapshot_tokens=64, max_num_batched_tokens=32)
    queue, caught = engine._scheduler, set()
    schedule = queue.schedule

    def preempting():
        for sequence in [s for s in queue.running if s.scoring and s.computed > 64 and s.id not in caught]:
            caught.add(sequence.id)
            queue._preempt(sequence)
        return schedule()

    queue.schedule = preempting
    prompts = [random_prompt(150 + n, seed=n) for n in range(3)]
    for completion, prompt in zip(engine.generate(prompts, SCORE), prompts, strict=True):
        assert_scored(completion, references(family), prompt)
        assert completion.preemptions
    assert len(caught) == len(prompts)
    assert bool(engine.stats()["engine"]["preemptions_recomputed"]) is not bool(host)


def test_the_first_piece_of_a_stream_has_them(engines, references):
    engine = engines("llama")
    prompt = random_prompt(50)
    for count in (1, 4):
        pieces = list(engine.iterate(prompt, replace(SCORE, max_new_tokens=count, logprobs=2)))
        assert [bool(piece.prompt_logprobs) for piece in pieces] == [True] + [False] * (count - 1)
        assert list(pieces[0].prompt_logprobs) == pieces[-1].completion.prompt_logprobs
        assert [report for piece in pieces for report in piece.logprobs] == pieces[-1].completion.logprobs
        assert_scored(pieces[-1].completion, references("llama"), prompt)


@pytest.mark.parametrize("wrong", [{"prompt_logprobs": -1}, {"prompt_logprobs": 51}, {"prompt_logprobs_from": -1}])
def test_refused(wrong):
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(**wrong)
