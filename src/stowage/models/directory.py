"""A checkpoint's directory: what its config describes, and its tokenizer. Whether it is whole, `files` says."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from stowage.errors import CheckpointError
from stowage.models.multimodal import TextPart, text_part
from stowage.models.published.hf_quant_config import hf_quant_config

logger = logging.getLogger("stowage.models")
_REASON_CHARACTERS = 200
_MAKING = Lock()
_LAYERS = re.compile(r'"(?:num_|n_)?(?:hidden_|encoder_|decoder_)?layers?"\s*:\s*(\d{5,})')
"""Ten thousand and more."""
_PARTS = ("text_config", "llm_config")


def part_of(path: Path) -> TextPart:
    """What the checkpoint in that directory, or of that config file, is run as. Raises CheckpointError."""
    return text_part(config_of(path / "config.json" if path.is_dir() else path))


def config_of(file: Path) -> Any:
    """Transformers' config of a ``config.json``, and how its weights are quantized. Raises CheckpointError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    refuse_absurd(file)
    try:
        found = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        parts: tuple[Any, ...] = (found, getattr(found, "text_config", None))
        for part in parts:
            if "float8" in str(getattr(part, "dtype", "")):  # of the codes: nothing is run in it
                part.dtype = None
        if all(getattr(part, "quantization_config", None) is None for part in parts):
            stated = hf_quant_config(file.parent)
            if stated is not None:
                found.quantization_config = stated
        return found
    except (ValueError, OSError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        found = _config_of_architecture(file)
        if found is not None:
            return found
        why = str(error)
        if isinstance(error, StrictDataclassError):  # what was found is its last line
            why = " ".join(why.split())[-_REASON_CHARACTERS:]
        raise CheckpointError(f"{file} is not a config that Transformers understands: {why}") from error


def refuse_absurd(file: Path) -> None:
    """Before a list of as many layers is made as a config says there are, and where what it says of quantization is no
    object. Raises CheckpointError.
    """
    try:
        text = file.read_text(encoding="utf-8")
        entries = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return  # that it cannot be read is said by whoever reads it
    found = _LAYERS.search(text)
    if found is not None:
        raise CheckpointError(f"{file} says that the model has {found[1][:40]} layers; download it again.")
    parts = (entries, *(entries.get(name) for name in _PARTS)) if isinstance(entries, dict) else ()
    stated = [part["quantization_config"] for part in parts if isinstance(part, dict) and "quantization_config" in part]
    wrong = next((one for one in stated if not isinstance(one, dict | None)), None)
    if wrong is not None:
        raise CheckpointError(
            f"{file} has {json.dumps(wrong)[:40]} as quantization_config. It must be an object that says how "
            'the weights are quantised, as {"quant_method": "fp8"}. Download config.json again, or remove the entry '
            "where they are not quantised."
        )


def _config_of_architecture(file: Path) -> Any:
    """The config of a checkpoint whose type Transformers does not know, while it has the class of model that the config
    names (Kimi-K2 is a ``DeepseekV3ForCausalLM``); ``None`` if it has not.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        if entries.get("model_type") in CONFIG_MAPPING:
            return None  # it is known, and refused for another reason
        (architecture,) = entries["architectures"]
        if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            return None
        config_class = getattr(transformers, architecture).config_class
        logger.warning(
            "Transformers does not know the model type %r; the model is run as a %s, as its config.json says. Compare "
            "an answer with one that you trust.",
            entries.get("model_type"),
            architecture,
        )
        return config_class(**{k: v for k, v in entries.items() if k not in ("model_type", "auto_map")})
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError):
        return None


def has_tokenizer(directory: Path) -> bool:
    """Whether the checkpoint there reads text."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


class _Json:
    """``json`` for Transformers' loading of tokenizers, which takes of a tokenizer's file its added tokens: the
    megabytes of vocabulary behind them are left to the library that makes the tokenizer.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(json, name)

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        if options or Path(str(getattr(file, "name", ""))).name != "tokenizer.json":
            return json.load(file, **options)
        return until_added_tokens(file.read())


def until_added_tokens(text: str) -> Any:
    """What ``text`` is as JSON. Of an object with ``added_tokens``, the entries up to them."""
    read, skip = json.JSONDecoder().raw_decode, json.decoder.WHITESPACE.match  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    try:
        at, open_with = skip(text, 0).end(), "{"
        while text[at] == open_with and "added_tokens" not in found:
            name, at = read(text, skip(text, at + 1).end())
            at = skip(text, at).end()
            if text[at] != ":":
                break
            found[name], at = read(text, skip(text, at + 1).end())
            at, open_with = skip(text, at).end(), ","
    except (ValueError, IndexError, TypeError):
        found.clear()  # what is wrong with it is told where all of it is read
    return found if "added_tokens" in found else json.loads(text)


def _takes_added_tokens(base: Any) -> bool:
    """Whether this series of Transformers takes nothing else of a tokenizer's file where ``base`` reads one."""
    code = getattr(base.PreTrainedTokenizerBase._from_pretrained, "__code__", None)
    said = set(code.co_consts) if code is not None else set()
    return "added_tokens" in said and not said & {"model", "normalizer", "pre_tokenizer", "post_processor", "decoder"}


@contextmanager
def _made_once() -> Iterator[None]:
    """In here, a tokenizer takes what was read of its file for its own: Transformers would copy it, by writing all of
    it and reading that. Nobody else has it, and later copies are copies.
    """
    from transformers import PreTrainedTokenizerFast as Fast
    from transformers import tokenization_utils_base as base

    own = vars(Fast).get("convert_to_native_format")
    if not isinstance(own, classmethod):  # another series of Transformers
        yield
        return
    made: list[Any] = []

    def convert(cls: Any, *args: Any, **options: Any) -> Any:
        given = own.__func__(cls, *args, **options)
        read = given.get("tokenizer_object") if isinstance(given, dict) else None
        if read is not None and read is not options.get("tokenizer_object") and hasattr(read, "__dict__"):
            read.__deepcopy__ = lambda _: read
            made.append(read)
        return given

    with _MAKING:
        Fast.convert_to_native_format = classmethod(convert)
        brief = getattr(base, "json", None) is json and _takes_added_tokens(base)
        vars(base).update({"json": _Json()} if brief else {})
        try:
            yield
        finally:
            vars(base).update({"json": json} if brief else {})
            Fast.convert_to_native_format = own
            for read in made:
                del read.__deepcopy__


def load_tokenizer(directory: Path) -> Any:
    """The checkpoint's tokenizer with its chat template; ``None`` where it has none. Raises CheckpointError."""
    from transformers import AutoTokenizer

    if not has_tokenizer(directory):
        return None
    try:
        with _made_once():
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        apart = directory / "chat_template.json"  # where processors of pictures and text have it
        if not tokenizer.chat_template and apart.is_file():
            tokenizer.chat_template = json.loads(apart.read_text(encoding="utf-8"))["chat_template"]
        return tokenizer
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:_REASON_CHARACTERS]
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be loaded: {why}. Download tokenizer.json and tokenizer_config.json "
            "again."
        ) from error
