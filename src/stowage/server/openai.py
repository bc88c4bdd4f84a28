"""What an OpenAI client asks for: from the body of a request to prompts of tokens and parameters for the engine.

Strict, so that nobody is served something else than what was asked for: a field that is not known, not supported or
out of range is refused by name. Beyond OpenAI's own there are vLLM's: `top_k`, `min_p`, `repetition_penalty`,
`min_tokens`, `stop_token_ids`, `ignore_eos`, `cache_salt`, `chat_template_kwargs`, `add_generation_prompt` and
`continue_final_message`. Reading takes time for long prompts (they are tokenized here): never on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from stowage.engine.engine import Engine
from stowage.engine.prompts import PLAINLY, Begin, PromptTooLong, unasked
from stowage.engine.sampling_params import LOGIT_BIAS_MAX, STOP_CHARACTERS_MAX, SamplingParams
from stowage.errors import RequestError
from stowage.server.fields import Fields, parse_object
from stowage.server.limits import Limits
from stowage.server.refusal import ApiError, bad
from stowage.server.structured import structured_outputs

LOGPROBS_MAX: Final = 20
LOGPROB_ENTRIES_MAX: Final = 1 << 18
"""Log-probabilities of prompts that one request may ask for: each takes some hundred bytes until it is sent."""
COMPLETION_TOKENS: Final = 16
"""What `max_tokens` of a completion is when it is left out; OpenAI's default."""
_STOPS_MAX: Final = 16
_STOP_TOKENS_MAX: Final = 64
_TOKENS_MOST: Final = (1 << 31) - 1
_SEEDS: Final = 1 << 63
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEMPLATE_RESERVED: Final = frozenset(
    "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
_NO_TEXT: Final = (
    "This model has no chat template, so it cannot answer chats. Use /v1/completions with a prompt of text."
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as tokens; `text` is what `echo` repeats."""

    tokens: list[int]
    text: str
    new_tokens_max: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, understood. `n` choices of each prompt; choice i of prompt p has the index p * n + i.

    logprobs: how many likeliest tokens are reported beside each token; None: no log-probabilities at all. silent:
    nothing is to be generated, which the engine cannot do: it draws a token that is not shown.
    """

    chat: bool
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    params: SamplingParams
    cache_salt: str
    stream: bool
    include_usage: bool
    logprobs: int | None = None
    echo: bool = False
    silent: bool = False

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    def params_of(self, choice: int) -> SamplingParams:
        """Of one choice: choices of one prompt must not all be drawn with the same seed."""
        prompt, number = divmod(choice, self.n)
        seed = self.params.seed
        return replace(
            self.params,
            max_new_tokens=max(1, self.prompts[prompt].new_tokens_max),
            seed=None if seed is None else (seed + number) % _SEEDS,
            prompt_logprobs=None if number else self.params.prompt_logprobs,  # the same for all choices of a prompt
        )


class Reader:
    """Reads requests for one engine, which is served under `name`. Several threads may at a time."""

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self.names = (name, *engine.adapter_names)
        self._tokenizer = engine.tokenizer
        self._prompts = engine.prompts
        self._vocab, self._grammars = engine.parts.layout.vocab, engine.grammars
        self._tokens_max = engine.sequence_tokens_max
        self._max_prompt_tokens = min(limits.max_prompt_tokens or self._tokens_max, self._tokens_max)
        self._max_choices = min(limits.max_choices, limits.max_queued_requests + engine.memory.max_num_seqs)
        self._template = str(getattr(engine.tokenizer, "chat_template", None) or "")

    def completion(self, body: bytes | bytearray, begin: Begin = unasked) -> Ask:
        """A request to /v1/completions. `begin`: see `Prompts.read`. Raises ApiError."""
        fields = Fields(parse_object(body))
        fields.without_effect("user")
        fields.neutral("suffix", "")
        model, n = self._model(fields), self._n(fields)
        fields.neutral("best_of", n)
        new_tokens = fields.whole("max_tokens", None, 0, _TOKENS_MOST)
        logprobs = fields.whole("logprobs", None, 0, LOGPROBS_MAX)
        echo = fields.flag("echo")
        params = self._params(fields, logprobs)
        if echo and logprobs is not None:
            params = replace(params, prompt_logprobs=logprobs)
        stream, include_usage = self._stream(fields)
        cache_salt, raw = fields.text("cache_salt", "") or "", fields.take("prompt")
        fields.finish()
        listed = _prompts(raw)
        self._count_choices(len(listed), n)
        prompts = tuple(
            self._prompt(item, new_tokens, min(COMPLETION_TOKENS, self._tokens_max), begin) for item in listed
        )
        if params.prompt_logprobs is not None:
            _count_logprobs(sum(len(prompt.tokens) for prompt in prompts) * n * (params.prompt_logprobs + 1))
        _check_least(params, prompts)
        silent = new_tokens == 0
        return Ask(
            False, model, prompts, n, params, cache_salt, stream, include_usage, logprobs, echo=echo, silent=silent
        )

    def chat(self, body: bytes | bytearray, begin: Begin = unasked) -> Ask:
        """A request to /v1/chat/completions. Raises ApiError."""
        fields = Fields(parse_object(body))
        fields.without_effect("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata")
        fields.without_effect("store", "service_tier", "parallel_tool_calls", "prediction")
        for name in ("tools", "functions"):
            fields.neutral(name, [])
        fields.neutral("tool_choice", "none", "auto")
        fields.neutral("function_call", "none", "auto")
        fields.neutral("modalities", ["text"])
        for name in ("audio", "verbosity", "web_search_options"):
            fields.neutral(name)
        template = self._template_options(fields)
        model, n = self._model(fields), self._n(fields)
        old = fields.whole("max_tokens", None, 1, _TOKENS_MOST)
        new_tokens = fields.whole("max_completion_tokens", old, 1, _TOKENS_MOST)
        if old not in (None, new_tokens):
            raise bad("'max_tokens' and 'max_completion_tokens' differ; give one of them.", "max_tokens")
        wants, top = fields.flag("logprobs"), fields.whole("top_logprobs", None, 0, LOGPROBS_MAX)
        if top is not None and not wants:
            raise bad("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        logprobs = (top or 0) if wants else None
        params = self._params(fields, logprobs)
        stream, include_usage = self._stream(fields)
        cache_salt, raw = fields.text("cache_salt", "") or "", fields.take("messages")
        fields.finish()
        self._count_choices(1, n)
        if not self._template:
            raise bad(_NO_TEXT, "messages", "no_chat_template")
        prompt = self._prompt(_messages(raw), new_tokens, self._tokens_max, begin, template)
        _check_least(params, (prompt,))
        return Ask(True, model, (prompt,), n, params, cache_salt, stream, include_usage, logprobs)

    def _model(self, fields: Fields) -> str:
        model = fields.needed_text("model")
        if model not in self.names:
            known = ", ".join(map(repr, self.names))
            what = f"The model {model[:200]!r} does not exist here. This server has {known}."
            raise ApiError(404, what, param="model", code="model_not_found")
        return model

    def _n(self, fields: Fields) -> int:
        return fields.whole("n", 1, 1, self._max_choices) or 1

    def _count_choices(self, prompts: int, n: int) -> None:
        if prompts * n > self._max_choices:
            what = f"{prompts} prompts times {n} choices: one request may ask for at most {self._max_choices}."
            raise bad(what, "n" if n > 1 else "prompt")

    def _params(self, fields: Fields, logprobs: int | None) -> SamplingParams:
        seed = fields.whole("seed", None, -_SEEDS, _SEEDS - 1)
        top_k = fields.whole("top_k", 0, -1, _TOKENS_MOST) or 0
        values: dict[str, Any] = {
            "max_new_tokens": _TOKENS_MOST,  # until the prompt is known
            "temperature": fields.number("temperature", 1.0, 0.0, 2.0),
            "top_p": fields.number("top_p", 1.0, 0.0, 1.0),
            "top_k": max(0, top_k),
            "min_p": fields.number("min_p", 0.0, 0.0, 1.0),
            "seed": None if seed is None else seed % _SEEDS,
            "stop": fields.texts("stop", _STOPS_MAX, STOP_CHARACTERS_MAX),
            "stop_token_ids": fields.wholes("stop_token_ids", _STOP_TOKENS_MAX),
            "ignore_eos": fields.flag("ignore_eos"),
            "logprobs": 0 if logprobs is None else max(1, logprobs),
            "min_tokens": fields.whole("min_tokens", 0, 0, _TOKENS_MOST) or 0,
            "presence_penalty": fields.number("presence_penalty", 0.0, -2.0, 2.0),
            "frequency_penalty": fields.number("frequency_penalty", 0.0, -2.0, 2.0),
            "repetition_penalty": fields.number("repetition_penalty", 1.0, 0.01, 10.0),
            "logit_bias": fields.biases("logit_bias", LOGIT_BIAS_MAX, self._vocab),
            "structured_outputs": structured_outputs(fields, self._grammars),
        }
        if values["stop"] and self._tokenizer is None:
            raise bad("This model has no tokenizer, so 'stop' cannot be used; use 'stop_token_ids'.", "stop")
        for name in ("top_p", "min_p"):  # the ends of their ranges that the engine excludes
            try:
                SamplingParams(**{name: values[name]})
            except RequestError as error:
                raise bad(str(error), name) from error
        return SamplingParams(**values)

    def _stream(self, fields: Fields) -> tuple[bool, bool]:
        stream, given = fields.flag("stream"), fields.given("stream_options")
        options = fields.inside("stream_options")
        if options is None:
            return stream, False
        include_usage = options.flag("include_usage")
        options.without_effect("include_obfuscation")
        options.finish()
        if given and not stream:
            raise bad("'stream_options' may be given only when 'stream' is true.", "stream_options")
        return stream, include_usage

    def _template_options(self, fields: Fields) -> dict[str, Any]:
        """What the chat template is given besides the messages."""
        options = fields.mapping("chat_template_kwargs")
        reserved = sorted(_TEMPLATE_RESERVED.intersection(options))
        if reserved:
            what = f"'chat_template_kwargs' may not have {reserved[0]!r}, which is not for the template to decide."
            raise bad(what, "chat_template_kwargs")
        effort = fields.text("reasoning_effort")
        if effort is not None:
            if "reasoning_effort" not in self._template:
                what = "This model's chat template knows no 'reasoning_effort'. Leave it out."
                raise bad(what, "reasoning_effort", "unsupported_parameter")
            options["reasoning_effort"] = effort
        goes_on = fields.flag("continue_final_message")
        begins = fields.flag("add_generation_prompt", not goes_on)
        if goes_on and begins:
            what = "'continue_final_message' and 'add_generation_prompt' exclude each other; give one of them."
            raise bad(what, "continue_final_message")
        return options | {"add_generation_prompt": begins, "continue_final_message": goes_on}

    def _prompt(
        self, raw: Any, new_tokens: int | None, default: int, begin: Begin, template: Mapping[str, Any] = PLAINLY
    ) -> Prompt:
        chat = isinstance(raw, list) and isinstance(raw[0], dict)
        param = "messages" if chat else "prompt"
        most = self._max_prompt_tokens
        try:
            tokens = self._prompts.read(raw, most, begin, template)
        except PromptTooLong as error:
            count = error.what.removesuffix(" tokens")
            what = f"This server takes at most {most} tokens in {param!r}; these are {count.rstrip(',')}."
            raise bad(what, param, "context_length_exceeded") from error
        except ApiError:
            raise
        except RequestError as error:
            raise bad(f"In {param!r}: {error}", param) from error
        room = self._tokens_max - len(tokens) + 1
        if new_tokens is not None and new_tokens > room:
            raise bad(
                f"This server takes at most {self._tokens_max + 1} tokens per sequence. These are {len(tokens)} in "
                f"{param!r}, and {new_tokens} more are asked for: shorten {param!r}, or ask for at most {room}.",
                param,
                "context_length_exceeded",
            )
        text = raw if isinstance(raw, str) else "" if chat else self._decode(tokens)
        return Prompt(tokens, text, min(default, room) if new_tokens is None else new_tokens)

    def _decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _prompts(raw: Any) -> list[str | list[int]]:
    """One prompt or several: text, token ids, a list of texts, a list of lists of token ids."""
    if isinstance(raw, str):
        return [_encodable(raw)]
    if isinstance(raw, list) and raw:
        if all(type(item) is int for item in raw):
            return [raw]
        if all(isinstance(item, str) for item in raw):
            return [_encodable(item) for item in raw]
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in raw):
            return raw
    raise bad("'prompt' must be text, a list of token ids, or a list of such; none may be empty.", "prompt")


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad(f"'prompt' is no text: it has half a surrogate pair at {error.start}.", "prompt") from error
    return text


def _messages(raw: Any) -> list[dict[str, str]]:
    if not isinstance(raw, list) or not raw:
        raise bad("'messages' must be a list of messages with 'role' and 'content'; it may not be empty.", "messages")
    return [_message(item, f"messages[{at}]") for at, item in enumerate(raw)]


def _message(raw: Any, where: str) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise bad(f"{where!r} must be an object with 'role' and 'content'.", where)
    fields = Fields(raw, where)
    role = fields.needed_text("role")
    if role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        raise bad(
            f"'{where}.role' is {role[:40]!r}, which this server does not support; use one of {known}.", f"{where}.role"
        )
    for name in ("tool_calls", "function_call", "audio"):
        fields.neutral(name, [])
    fields.without_effect("refusal")
    author = fields.text("name")
    content = _content(fields)
    fields.finish()
    return {"role": _ROLES[role], "content": content} | ({"name": author} if author else {})


def _content(fields: Fields) -> str:
    """The text of a message; parts of type text are joined with line breaks."""
    where, raw = fields.path("content"), fields.take("content")
    if isinstance(raw, str):
        return fields.as_text("content", raw)
    if not isinstance(raw, list) or not raw:
        raise bad(f"{where!r} must be text, or a list of parts of type text.", where)
    texts = []
    for at, part in enumerate(raw):
        inside = Fields(part, f"{where}[{at}]") if isinstance(part, dict) else None
        if inside is None or inside.text("type") != "text":
            raise bad(f"'{where}[{at}]' is no part of type 'text', and others are not supported by this server.", where)
        texts.append(inside.needed_text("text"))
        inside.finish()
    return "\n".join(texts)


def _check_least(params: SamplingParams, prompts: tuple[Prompt, ...]) -> None:
    most = min(prompt.new_tokens_max for prompt in prompts)
    if params.min_tokens > max(1, most):
        raise bad(f"'min_tokens' is {params.min_tokens}, and an answer may have {most} tokens here.", "min_tokens")


def _count_logprobs(entries: int) -> None:
    if entries > LOGPROB_ENTRIES_MAX:
        raise bad(
            f"'echo' with 'logprobs' asks for {entries} log-probabilities of prompts; one request may ask for at most "
            f"{LOGPROB_ENTRIES_MAX}. Send fewer or shorter prompts at once.",
            "logprobs",
        )
