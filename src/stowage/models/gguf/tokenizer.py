"""The tokenizer that a GGUF file's fields describe, and its chat template.

Owns how llama.cpp's names (``tokenizer.ggml.model`` and ``.pre``) translate to ``tokenizers``. A name that is not known
is refused: a prompt that is cut elsewhere is another prompt. Sources: ``llama-vocab.cpp`` of
https://github.com/ggml-org/llama.cpp for what each name means, the models' own ``tokenizer.json`` for how it is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stowage.errors import CheckpointError, UnsupportedModelError
from stowage.models.gguf.stop_tokens import named_ends
from stowage.weights.gguf import GgufFile

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTED: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH: Final = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_CASED: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+CONTRACTED|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*CONTRACTED|"
)
_LETTERS: Final = _CONTRACTED + r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_CLITICS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_MARKED: Final = (
    _CONTRACTED + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI: Final = r"\p{Han}+|" + re.sub(r"(?<=\\p\{M\})\]", r"&&[^\\p{Han}]]", _CASED.replace("CONTRACTED", _CLITICS))
_AFMOE: Final = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[一-鿿㐀-䶿豈-﫿\u3040-ゟ゠-ヿ･-ﾟ⼀-⿟เ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
)
_AYA: Final = (r"\d{1,3}(?=(?:\d{3})*\b)",)
_YOUTU: Final = ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",)
_LING: Final = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE: Final = (
    _CONTRACTED + r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED: Final = _LETTERS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_SCRIPTS: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_EASTERN: Final = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LLM: Final = (r"[\r\n]", rf"\s?[{_CASED_SCRIPTS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _EASTERN)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN)


@dataclass(frozen=True, slots=True)
class _Pre:
    """How a text is cut before pairs are merged. ``digits``: one by one, before anything else. ``before``: what is cut
    out before that. ``whole``: a piece that is a token is not put together from merges. ``begins``: with the token that
    begins a text, unless a file says so.
    """

    pattern: str
    digits: bool = False
    whole: bool = False
    composed: bool = False
    begins: bool = False
    before: tuple[str, ...] = ()


PRES: Final[Mapping[str, _Pre]] = {
    name: pre
    for names, pre in (
        ("gpt-2 gpt2 phi-2 mpt olmo exaone4 granite-docling jais trillion gigachat a.x-4.0 mellum", _Pre(_GPT2)),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b", _Pre(_GPT2, digits=True)),
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2 midm-2.0 pixtral",
            _Pre(_LETTERS + r"\p{N}{1,3}" + _REST, whole=True, begins=True),
        ),
        ("dbrx smaug-bpe chatglm-bpe", _Pre(_LETTERS + r"\p{N}{1,3}" + _REST)),
        ("glm4 glm5", _Pre(_LETTERS + r"\p{N}{1,3}" + _REST, whole=True)),
        ("qwen2 deepseek-r1-qwen hunyuan megrez", _Pre(_LETTERS + r"\p{N}" + _REST, composed=True)),
        ("grok-2 kormo solar-open stablelm2", _Pre(_LETTERS + r"\p{N}" + _REST)),
        ("tekken", _Pre(_CASED.replace("CONTRACTED", "") + r"\p{N}" + _REST_SLASH, whole=True, begins=True)),
        (
            "gpt-4o llama4 minimax-m2 kanana2",
            _Pre(_CASED.replace("CONTRACTED", _CLITICS) + r"\p{N}{1,3}" + _REST_SLASH),
        ),
        ("kimi-k2", _Pre(_KIMI + r"\p{N}{1,3}" + _REST, whole=True)),
        ("bailingmoe bailingmoe2 llada-moe", _Pre(_LING)),
        ("exaone-moe", _Pre(_EXAONE)),
        ("seed-coder", _Pre(_SEED)),
        ("viking", _Pre(r"\p{N}", before=(r" ?[^(\s|.,!?…。，、।۔،)]+",))),
        ("superbpe", _Pre(r"(?=(\d{3})+(?!\d))", before=(r"\p{N}+",))),
        ("deepseek-llm", _Pre(r"\p{N}", before=_DEEPSEEK_LLM)),
        ("deepseek-coder", _Pre(r"\p{N}", before=_DEEPSEEK_CODER)),
        ("qwen35", _Pre(_MARKED, composed=True)),
        ("afmoe", _Pre(_DEEPSEEK, before=_AFMOE)),
        ("tiny_aya", _Pre(_CASED.replace("CONTRACTED", _CLITICS) + r"\p{N}{1,3}" + _REST_SLASH, before=_AYA)),
        ("youtu", _Pre(_CASED.replace("CONTRACTED", _CLITICS) + r"\p{N}" + _REST_SLASH, whole=True, before=_YOUTU)),
        ("minicpm5", _Pre(_LETTERS + r"\p{N}+" + _REST, whole=True, before=(r"\p{N}{1,3}",))),
        ("deepseek-v3 hunyuan-dense joyai-llm", _Pre(_DEEPSEEK, before=(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+"))),
    )
    for name in names.split()
}
_SPACE: Final = "▁"
_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_of(file: GgufFile, context_tokens: int) -> Any:
    """A ``PreTrainedTokenizerFast``; ``None`` where the file has none. Raises UnsupportedModelError for a kind that is
    not known, CheckpointError for lists that do not fit together.
    """
    kind = _field(file, "model")
    if kind in (None, "none", "no_vocab"):
        return None
    tokens, kinds = _field(file, "tokens"), _field(file, "token_type")
    if not isinstance(tokens, list) or (
        kinds is not None and (not isinstance(kinds, list) or len(kinds) != len(tokens))
    ):
        raise CheckpointError(f"{file.paths[0]} has a tokenizer whose lists do not fit together; download it again.")
    kinds = kinds or [1] * len(tokens)
    if kind == "gpt2":
        backend, begins = _byte_level(file, tokens)
    elif kind in ("llama", "gemma4"):
        backend, begins = _sentence_pieces(file, tokens), True
    else:
        raise _unknown(file, f"of the kind {str(kind)[:40]!r}, which is not read from GGUF: gpt2, llama and gemma4 are")
    _add(backend, tokens, kinds)
    return _fast(file, backend, tokens, begins, context_tokens)


def _field(file: GgufFile, name: str) -> Any:
    return file.fields.get(f"tokenizer.ggml.{name}")


def _unknown(file: GgufFile, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file.paths[0]} has a tokenizer {what}. Give the model's own tokenizer in Python, Engine(FILE, "
        "tokenizer=AutoTokenizer.from_pretrained(NAME)), or its Hugging Face checkpoint."
    )


def _merges(file: GgufFile, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    found = _field(file, "merges")
    if not isinstance(found, list) or not all(isinstance(merge, str) for merge in found):
        raise CheckpointError(f"{file.paths[0]} has a tokenizer without merges; download it again.")
    pairs = [(one, other) for one, _, other in (merge.partition(" ") for merge in found)]
    bad = next((pair for pair in pairs if not {*pair, "".join(pair)} <= ids.keys()), None)
    if bad is not None:
        raise CheckpointError(f"{file.paths[0]} merges {bad} to no token of its vocabulary; download it again.")
    return pairs


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> tuple[Any, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = _field(file, "pre")
    pre = PRES.get(name) if isinstance(name, str) else None
    if pre is None:
        how = f"that cuts texts as {str(name)[:40]!r}" if name else "and does not say how it cuts texts"
        raise _unknown(file, f"{how} (tokenizer.ggml.pre), which is not read from GGUF")
    ids = {token: number for number, token in enumerate(tokens)}
    backend: Any = Tokenizer(models.BPE(vocab=ids, merges=_merges(file, ids), ignore_merges=pre.whole))
    if pre.composed:
        backend.normalizer = normalizers.NFC()
    if pre.pattern is _GPT2:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        cuts = (*pre.before, pre.pattern)
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cuts]
        steps = [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.begins


def _sentence_pieces(file: GgufFile, tokens: Sequence[str]) -> Any:
    """Pieces with scores as pairs that are merged, which is how SentencePiece merges them."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _field(file, "scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{file.paths[0]} has a tokenizer without scores; download it again.")
    ids = {token: number for number, token in enumerate(tokens)}
    unknown = _field(file, "unknown_token_id")
    unk = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    merges = _merges(file, ids) if _field(file, "merges") is not None else _merges_of(tokens, scores, ids)
    model = models.BPE(vocab=ids, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    backend: Any = Tokenizer(model)
    prefix = _field(file, "add_space_prefix") is not False
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_of(tokens: Sequence[str], scores: Sequence[float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, the best scored first (Transformers' ``generate_merges``)."""
    found = []
    for token, score in zip(tokens, scores, strict=True):
        own = [
            (token[:at], token[at:], score) for at in range(1, len(token)) if token[:at] in ids and token[at:] in ids
        ]
        found += sorted(own, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    found.sort(key=lambda pair: (pair[2], len(pair[0]), len(pair[1])), reverse=True)
    return [(one, other) for one, other, _ in found]


def _add(backend: Any, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    from tokenizers import AddedToken

    ends = {tokens[number] for number in named_ends(tokens)}
    each = [(token, _CONTROL if token in ends else kind) for token, kind in zip(tokens, kinds, strict=True)]
    control = [AddedToken(token, special=True, normalized=False) for token, kind in each if kind == _CONTROL]
    own = [AddedToken(token, special=False, normalized=False) for token, kind in each if kind == _USER_DEFINED]
    backend.add_special_tokens(control)
    backend.add_tokens(own)


def _templates(file: GgufFile) -> str | dict[str, str] | None:
    """The chat template; by name where there is more than one, such as another one for tools."""
    begin = "tokenizer.chat_template"
    named = {
        key.removeprefix(f"{begin}."): value
        for key, value in file.fields.items()
        if key.startswith(f"{begin}.") and isinstance(value, str)
    }
    own = file.fields.get(begin)
    if isinstance(own, str):
        named["default"] = own
    return named.get("default") if named.keys() <= {"default"} else named


def _fast(file: GgufFile, backend: Any, tokens: Sequence[str], begins: bool, context_tokens: int) -> Any:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = _field(file, f"{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            named[f"{name}_token"] = tokens[number]
    ends = _field(file, "add_eos_token") is True and "eos_token" in named
    begins = (begins if (said := _field(file, "add_bos_token")) is None else said is True) and "bos_token" in named
    if begins or ends:
        around = [*([named["bos_token"]] if begins else []), "$A", *([named["eos_token"]] if ends else [])]
        ids = {named[f"{n}_token"]: _field(file, f"{n}_token_id") for n in ("bos", "eos") if f"{n}_token" in named}
        backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=list(ids.items()))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_templates(file),
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
        **named,
    )
