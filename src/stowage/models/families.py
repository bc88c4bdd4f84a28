"""Which families of Transformers the engine runs: what the tests prove, and what cannot be run, with the reason.

Owns the lists, and nothing that depends on them: what a model keeps and reads is found out by looking at it
(``layers``, ``probing``). Tests hold the lists to the table of tiny models that they are parametrised by, and see that
a refused family would be refused for what is found in it, whatever its name.
"""

from __future__ import annotations

from collections.abc import Mapping

ALONE = frozenset(
    """
    deepseek_v32 glm_moe_dsa deepseek_v4 inkling_text
    bloom mpt falcon gptj codegen gpt_neo gpt_neox_japanese xglm diffllama jetmoe
    axk2 hy_v4 minimax_m3_vl_text qwen4_exp_text doge minimax recurrent_gemma xlstm rwkv
    """.split()
)
"""By ``model_type`` of the config: proved with Transformers' own attention, one sequence at a time (``fallback``).
Their code computes attention by itself, does to scores and masks what the paged one does not know, changes what is
cached, or keeps states in an object of its own (``state_access.keeper_of``).
"""

SINGLY = frozenset({"recurrent_gemma"})
"""Of those, which go on from what they kept with single tokens only, and begin anew where they are given several."""

PROVED = (
    frozenset(
        """
    llama qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text
    mistral mixtral ministral ministral3 mistral4 gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text
    vaultgemma llama4_text deepseek_v2 deepseek_v3 kimi_linear minicpm3 glm4_moe_lite longcat_flash youtu axk1
    gpt_oss mimo_v2_flash granite granitemoe granitemoeshared granitemoehybrid granite_swa granitemoe_swa
    phi phi3 phimoe olmo olmo2 olmo3 olmoe olmo_hybrid flex_olmo cohere cohere2 cohere2_moe
    starcoder2 gpt2 gpt_bigcode gpt_neox opt biogpt ctrl persimmon
    glm glm4 glm4_moe nemotron nemotron_h bamba jamba zamba zamba2 zaya falcon_h1 lfm2 lfm2_moe
    ernie4_5 ernie4_5_moe hunyuan_v1_dense hunyuan_v1_moe hy_v3 minimax_m2 seed_oss exaone4 exaone_moe
    apertus arcee helium smollm3 stablelm cwm dots1 afmoe laguna mellum modernbert-decoder
    mamba mamba2 falcon_mamba bitnet nanochat jais2 solar_open hyperclovax
    aria_text dbrx hrm_text cohere_compass_text bert bert-generation electra ernie roc_bert
    """.split()
    )
    | ALONE
)
"""By ``model_type`` of the config, those included."""

DECODERS = frozenset({"bert", "bert-generation", "electra", "ernie", "roc_bert"})
"""Of those, which are causal models only where their config says that they are decoders."""

OUTER: Mapping[str, frozenset[str]] = {
    "gemma3": frozenset({"gemma3_text"}),
    "gemma3n": frozenset({"gemma3n_text"}),
    "gemma4": frozenset({"gemma4_text"}),
    "gemma4_unified": frozenset({"gemma4_unified_text"}),
    "llama4": frozenset({"llama4_text"}),
    "qwen3_5": frozenset({"qwen3_5_text"}),
    "qwen3_5_moe": frozenset({"qwen3_5_moe_text"}),
    "mistral3": frozenset({"mistral", "ministral3", "mistral4"}),
    "llava": frozenset({"llama", "mistral", "qwen2"}),
    "llava_next": frozenset({"llama", "mistral", "qwen2"}),
    "llava_onevision": frozenset({"qwen2"}),
    "internvl": frozenset({"llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"}),
    "idefics3": frozenset({"llama"}),
    "smolvlm": frozenset({"llama"}),
    "lfm2_vl": frozenset({"lfm2", "lfm2_moe"}),
    "voxtral": frozenset({"llama"}),
    "qwen2_vl": frozenset({"qwen2"}),
    "qwen2_5_vl": frozenset({"qwen2"}),
    "qwen3_vl": frozenset({"qwen3"}),
    "qwen3_vl_moe": frozenset({"qwen3_moe"}),
    "kimi_k25": frozenset({"deepseek_v3"}),
    "aria": frozenset({"aria_text"}),
    "cohere_compass": frozenset({"cohere_compass_text"}),
    "qwen4_exp": frozenset({"qwen4_exp_text"}),
    "fuyu": frozenset({"persimmon"}),
}
"""By ``model_type`` of the config: models that take pictures or sound, of which the text model is run (``outer``), and
the families that it may be of. Others are not what they are alone: Transformers' outer models leave out the scale that
Cohere's and Granite's logits have.
"""

AS_TEXT: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""By ``model_type`` of the text config, which family computes the same with text alone."""

FUTURE = "with Transformers' code for it a token's answer depends on tokens that come after it."
POSITIONS = (
    "Transformers' own `generate()` and forward disagree: the one counts positions from 0, the other on from the "
    "padding token, as the model was trained."
)
FORGETS = "Transformers' code for it keeps nothing between tokens, so there is nothing to go on from."
_DECODER = "it is the decoder of a model that reads its prompt with an encoder, and has nothing to say without that."
_PICTURES = "it takes pictures or sound, and no test holds the text of it alone to Transformers' answers."
_DRAFTS = "it drafts tokens for another model, whose keys it reads."

REFUSED: Mapping[str, str] = {
    "big_bird": FUTURE,
    "cpmant": FUTURE,
    "megatron-bert": FUTURE,
    "rembert": FUTURE,
    "roformer": FUTURE,
    "xlnet": FUTURE,
    "camembert": POSITIONS,
    "data2vec-text": POSITIONS,
    "roberta": POSITIONS,
    "roberta-prelayernorm": POSITIONS,
    "xlm-roberta": POSITIONS,
    "xlm-roberta-xl": POSITIONS,
    "xmod": POSITIONS,
    "openai-gpt": FORGETS,
    "xlm": FORGETS,
    "reformer": "it keeps what it hashed in a cache of its own class.",
}
"""By ``model_type``, why; what is said there is seen in tests, with a tiny model of each."""

NO_TEXT_MODELS: Mapping[str, str] = dict.fromkeys(
    "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper".split(),
    _DECODER,
) | {
    **dict.fromkeys("emu3 git got_ocr2 mllama moshi musicgen musicgen_melody phi4_multimodal".split(), _PICTURES),
    **dict.fromkeys("gemma4_assistant gemma4_unified_assistant".split(), _DRAFTS),
    "blt": "it reads bytes in patches, which another model inside of it cuts, and keeps a cache for each of its parts.",
}
"""By ``model_type``, why: other types that Transformers names among its causal models."""
