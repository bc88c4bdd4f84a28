"""Families that vLLM's CPU build refuses, with its reasons: when one of these tests fails, a family has been gained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.vllm.conftest import Start
from tests.vllm.models import FAMILIES, REFUSED
from tests.vllm.oracle import EngineError, connector, prompt, prove

HAS_AMX = torch.cpu._is_amx_tile_supported()


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_vllm_refuses(name: str, start: Start) -> None:
    """Without the plugin too."""
    refused = REFUSED[name]
    with pytest.raises(EngineError) as raised:
        start(name, family=refused.family).generate(prompt(300))
    assert any(reason in str(raised.value) for reason in refused.reasons), raised.value


@pytest.mark.skipif(HAS_AMX, reason="vLLM has prefix caching for MLA on this CPU")
def test_mla_without_amx(start: Start) -> None:
    """vLLM switches its prefix caching off, whatever it is told: then only the plugin finds anything. There is no hit
    of vLLM's to hold it against; in float32 the whole computation is close enough.
    """
    family = replace(FAMILIES["deepseek_v3"], dtype="float32")
    plain = start("deepseek_v3-fp32", family=family)
    assert not plain.ask("layout")["prefix_caching"]
    cold = plain.generate(prompt(300))
    assert plain.generate(prompt(300)).local == 0
    plain.close()
    engine = start("deepseek_v3-fp32", connector(), family=family)
    assert engine.generate(prompt(300)).external == 0
    found = []
    for _ in range(2):
        engine.forget()
        found.append(engine.generate(prompt(300)))
    assert [answer.external for answer in found] == [256, 256]
    assert found[0].distance(found[1]) == 0.0
    assert found[0].distance(cold) < 1e-4


def test_mla(start: Start, tmp_path: Path) -> None:
    """Latents come back exactly. Where vLLM would switch prefix caching off it is kept on, and the prompt is such that
    what is left after the hit is one token, which its kernel for decoding computes.
    """
    prepare = [] if HAS_AMX else ["keep_prefix_caching"]
    length = 1281 if HAS_AMX else 769
    engine = start("deepseek_v3", connector(disk=tmp_path / "cache"), prepare=prepare)
    local = prove(engine, prompt(length))
    engine.close()
    again = start("deepseek_v3", connector(disk=tmp_path / "cache"), prepare=prepare)
    external = again.generate(prompt(length))
    assert external.external == local.local
    assert external.distance(local) == 0.0


def test_a_cache_of_another_size_than_its_kernels_take_it_for(start: Start) -> None:
    """Plain vLLM starts, and writes beyond its cache."""
    with pytest.raises(EngineError, match=r"write outside of its blocks\. Set --kv-cache-dtype auto"):
        start("llama", connector(), kv_cache_dtype="bfloat16")


def test_a_cache_of_another_type_of_the_same_size(start: Start) -> None:
    """Is taken for the model's, and no block is missed."""
    prove(start("llama-bf16", connector(), kv_cache_dtype="float16"), prompt(300))
