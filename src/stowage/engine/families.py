"""Which families of Transformers the engine runs: what the tests prove, and what cannot be run, with the reason.

Owns the two lists, and nothing that depends on them: what a model keeps and reads is found out by looking at it
(``layers``, ``probing``). Tests hold the lists to the table of tiny models that they are parametrised by, and see that
a refused family would be refused for what is found in it, whatever its name.
"""

from __future__ import annotations

from collections.abc import Mapping

PROVED = frozenset(
    """
    llama qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text
    mistral mixtral ministral ministral3 gemma gemma2 gemma3_text gemma3n_text gemma4_text vaultgemma
    llama4_text deepseek_v2 deepseek_v3 kimi_linear minicpm3 glm4_moe_lite longcat_flash youtu axk1
    gpt_oss mimo_v2_flash granite granitemoe granitemoeshared granitemoehybrid granite_swa granitemoe_swa
    phi phi3 phimoe olmo olmo2 olmo3 olmoe olmo_hybrid flex_olmo cohere cohere2 cohere2_moe
    starcoder2 gpt2 gpt_bigcode gpt_neox opt biogpt ctrl persimmon
    glm glm4 glm4_moe nemotron nemotron_h bamba jamba zamba zamba2 zaya falcon_h1 lfm2 lfm2_moe
    ernie4_5 ernie4_5_moe hunyuan_v1_dense hunyuan_v1_moe hy_v3 minimax_m2 seed_oss exaone4 exaone_moe
    apertus arcee helium smollm3 stablelm cwm dots1 afmoe laguna mellum modernbert-decoder
    bitnet nanochat jais2 solar_open hyperclovax
    """.split()
)
"""By ``model_type`` of the config."""

_OWN_ATTENTION = "Transformers' code for it computes attention by itself, with no place to put a paged one."
_CHANGED = "it changes keys or values after they are cached, so what is cached is not what attention reads."
_INDEXED = "an indexer chooses the keys of each query, and its own cache is not paged yet."
_ALONE = "its layers are all recurrent, and it keeps their states in a cache of its own class."

REFUSED: Mapping[str, str] = {
    "bloom": _OWN_ATTENTION,
    "mpt": _OWN_ATTENTION,
    "falcon": _OWN_ATTENTION,
    "gptj": _OWN_ATTENTION,
    "codegen": _OWN_ATTENTION,
    "gpt_neo": _OWN_ATTENTION,
    "xglm": _OWN_ATTENTION,
    "diffllama": _CHANGED,
    "jetmoe": _CHANGED,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "deepseek_v4": "it keeps compressed keys beside a window, which are not paged yet.",
    "inkling_text": "it adds a bias for each distance to its scores, which the paged attention does not know yet.",
    "doge": "it makes a mask of its own from the values, which the paged attention does not know yet.",
    "minimax": "it keeps its recurrent states in a cache of its own class.",
    "recurrent_gemma": "it keeps recurrent states in its modules, so prompts cannot take turns.",
    "mamba": _ALONE,
    "mamba2": _ALONE,
    "falcon_mamba": _ALONE,
}
"""By ``model_type``, why."""
