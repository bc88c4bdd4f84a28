"""Two processes on one directory share prefixes; a process that ends without closing loses nothing that it kept."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stowage.errors import StowageError
from stowage.testing import tiny_models
from tests.forked import exit_code_of_a_child
from tests.library.conftest import SIZE, WAIT_S, answer, restored, tokens
from tests.nursery import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch
from transformers import AutoModelForCausalLM
import stowage

model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
prefixes = stowage.PrefixCache(model, "8MiB", sys.argv[2])
for seed in (0, 1):
    ids = torch.randint(5, 512, (1, 300), generator=torch.Generator().manual_seed(seed))
    cache = prefixes.restore(ids, timeout_s=30)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None)
    out = model.generate(ids, past_key_values=cache, **options)
    prefixes.keep(cache, out)
    print(prefixes.stats()["prefixes"]["tokens_restored"], *out[0, 300:].tolist())
"""


@pytest.mark.slow
def test_two_processes(prefix_caches, tmp_path):
    """The second one, which ends without closing, finds what the first one kept; and the first one what it kept."""
    disk = f"{tmp_path / 'cache'}:64MiB"
    checkpoint = tiny_models.write("gemma3", tmp_path / "model", SIZE)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    answers = [answer(model, tokens(300, seed=seed))[0] for seed in (0, 1)]
    ours = prefix_caches(model, disk=disk)  # open all the while
    cache = ours.restore(answers[0][:, :300])
    ours.keep(cache, answer(model, tokens(300), cache)[0])
    assert ours.flush()
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), disk]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = [[int(number) for number in line.split()] for line in done.stdout.strip().splitlines()[-2:]]
    assert found == [[256, *out[0, 300:].tolist()] for out in answers]
    caches = []

    def found_here() -> bool:
        """What others wrote is seen after a second."""
        before = restored(ours)
        caches.append(ours.restore(tokens(300, seed=1), timeout_s=WAIT_S))
        return restored(ours) - before == 256

    wait_until(found_here, "found")
    cache = caches[-1]
    assert torch.equal(answer(model, tokens(300, seed=1), cache)[0], answers[1])


def test_a_forked_child_is_told_to_make_its_own(prefix_caches):
    """It has neither the thread nor the memory, and may have got a lock that nobody gives back."""
    prefixes = prefix_caches("llama")
    cache = prefixes.prefill(tokens(300))

    def told() -> bool:
        calls = (lambda: prefixes.restore(tokens(300)), lambda: prefixes.keep(cache, tokens(300)), prefixes.stats)
        for call in calls:
            with pytest.raises(StowageError, match="make a PrefixCache in this process"):
                call()
        prefixes.close()
        return True

    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with prefixes._background.turn:
            held.set()
            forked.wait(60)

    writing = threading.Thread(target=hold)  # as the background does when it writes
    writing.start()
    held.wait(60)
    code = exit_code_of_a_child(told)
    forked.set()
    writing.join()
    assert code == 0
    assert prefixes.restore(tokens(300)).get_seq_length() == 256, "the parent goes on"
