"""Reads what all APIs have in common: the model, sampling parameters, prompts and conversations.

Strict: a field that is unknown, not supported or out of range is refused by name, so that no request is served with
another meaning. Beyond OpenAI's fields there are vLLM's: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`stop_token_ids`, `ignore_eos`, `cache_salt` and others. Long prompts are tokenized here, which takes time: never on the
event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from stowage.engine.engine import Engine
from stowage.engine.prompts import PLAINLY, Begin, PromptTooLong
from stowage.engine.sampling_params import LOGIT_BIAS_MAX, STOP_CHARACTERS_MAX, SamplingParams, StructuredOutputs
from stowage.errors import RequestError
from stowage.server.api_errors import ApiError, bad, no_model
from stowage.server.apis.generation_request import SEEDS, Prompt
from stowage.server.fields import Fields
from stowage.server.limits import Limits
from stowage.server.served_model import ServedModel
from stowage.server.tools.grammar import enforced_grammar
from stowage.server.tools.parser import OutputSyntax
from stowage.server.tools.request_tools import NO_TOOLS, RequestTools
from stowage.server.tools.template import ChatTemplate

LOGPROBS_MAX: Final = 20
_STOPS_MAX: Final = 16
_STOP_TOKENS_MAX: Final = 64
TOKENS_MOST: Final = (1 << 31) - 1
_TEMPLATE_RESERVED: Final = frozenset(
    "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
_NO_TEXT: Final = (
    "This model has no chat template, so it cannot answer chats. Use /v1/completions with a prompt of text, or start "
    "the server with --chat-template FILE."
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template. param: the field that its messages came from; wanted: the field that asks for
    structured output, and the structure.
    """

    messages: list[dict[str, Any]]
    param: str
    new_tokens: int | None
    tools: RequestTools = NO_TOOLS
    template: Mapping[str, Any] = field(default_factory=dict)
    wanted: tuple[str, StructuredOutputs] | None = None


class Reader:
    """Reads requests for one engine. Thread-safe."""

    def __init__(self, engine: Engine, served: ServedModel, limits: Limits) -> None:
        self.names = (served.name, *engine.adapter_names)
        self.tokenizer = engine.tokenizer
        self.prompts = engine.prompts
        self.vocab, self.grammars = engine.parts.layout.vocab, engine.grammars
        self.tokens_max = engine.sequence_tokens_max
        self.max_prompt_tokens = min(limits.max_prompt_tokens or self.tokens_max, self.tokens_max)
        self._max_choices = min(limits.max_choices, limits.max_queued_requests + engine.memory.max_num_seqs)
        self.chat_template = ChatTemplate(engine.tokenizer, served.tool_call_parser, served.reasoning_parser)

    # fields

    def model(self, fields: Fields, *, needed: bool = True) -> str:
        model = fields.needed_text("model") if needed else fields.text("model", self.names[0])
        assert model is not None
        if model not in self.names:
            raise no_model(model, self.names)
        return model

    def n(self, fields: Fields) -> int:
        return fields.whole("n", 1, 1, self._max_choices) or 1

    def count_choices(self, prompts: int, n: int) -> None:
        """Raises ApiError for too many."""
        if prompts * n > self._max_choices:
            what = f"{prompts} prompts times {n} choices: one request may ask for at most {self._max_choices}."
            raise bad(what, "n" if n > 1 else "prompt")

    def sampling(self, fields: Fields, logprobs: int | None = None, stop: str = "stop") -> SamplingParams:
        """The sampling parameters; `stop`: the API's field for stop strings."""
        seed = fields.whole("seed", None, -SEEDS, SEEDS - 1)
        top_k = fields.whole("top_k", 0, -1, TOKENS_MOST) or 0
        values: dict[str, Any] = {
            "max_new_tokens": TOKENS_MOST,  # until the prompt is known
            "temperature": fields.number("temperature", 1.0, 0.0, 2.0),
            "top_p": fields.number("top_p", 1.0, 0.0, 1.0),
            "top_k": max(0, top_k),
            "min_p": fields.number("min_p", 0.0, 0.0, 1.0),
            "seed": None if seed is None else seed % SEEDS,
            "stop": fields.texts(stop, _STOPS_MAX, STOP_CHARACTERS_MAX),
            "stop_token_ids": fields.tokens("stop_token_ids", _STOP_TOKENS_MAX, self.vocab),
            "ignore_eos": fields.flag("ignore_eos"),
            "logprobs": 0 if logprobs is None else max(1, logprobs),
            "min_tokens": fields.whole("min_tokens", 0, 0, TOKENS_MOST) or 0,
            "presence_penalty": fields.number("presence_penalty", 0.0, -2.0, 2.0),
            "frequency_penalty": fields.number("frequency_penalty", 0.0, -2.0, 2.0),
            "repetition_penalty": fields.number("repetition_penalty", 1.0, 0.01, 10.0),
            "logit_bias": fields.biases("logit_bias", LOGIT_BIAS_MAX, self.vocab),
            "skip_special_tokens": fields.flag("skip_special_tokens", True),
        }
        if values["stop"] and self.tokenizer is None:
            raise bad(f"This model has no tokenizer, so {stop!r} cannot be used; use 'stop_token_ids'.", stop)
        for name in ("top_p", "min_p"):  # the ends of their ranges that the engine excludes
            try:
                SamplingParams(**{name: values[name]})
            except RequestError as error:
                raise bad(str(error), name) from error
        return SamplingParams(**values)

    def stream(self, fields: Fields) -> tuple[bool, bool]:
        """Whether the answer is streamed, and whether usage follows it."""
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

    def template_options(self, fields: Fields) -> dict[str, Any]:
        """The chat template's values besides the messages."""
        options = fields.mapping("chat_template_kwargs")
        reserved = sorted(_TEMPLATE_RESERVED.intersection(options))
        if reserved:
            what = f"'chat_template_kwargs' may not have {reserved[0]!r}, which is not for the template to decide."
            raise bad(what, "chat_template_kwargs")
        for name in options:
            self.known(name, f"chat_template_kwargs.{name[:40]}")
        options |= self.effort(fields.text("reasoning_effort"), "reasoning_effort")
        goes_on = fields.flag("continue_final_message")
        begins = fields.flag("add_generation_prompt", not goes_on)
        if goes_on and begins:
            what = "'continue_final_message' and 'add_generation_prompt' exclude each other; give one of them."
            raise bad(what, "continue_final_message")
        return options | {"add_generation_prompt": begins, "continue_final_message": goes_on}

    def effort(self, effort: str | None, where: str) -> dict[str, Any]:
        """`reasoning_effort` as a value for the chat template."""
        if effort is None:
            return {}
        self.known("reasoning_effort", where)
        return {"reasoning_effort": effort}

    def known(self, name: str, where: str) -> None:
        """Raises ApiError for a value that the chat template does not use."""
        if self.chat_template.template and not self.chat_template.knows(name):
            what = f"This model's chat template knows no {name[:40]!r}. Leave it out."
            raise bad(what, where, "unsupported_parameter")

    # prompts

    def conversation(
        self, chat: Conversation, params: SamplingParams, begin: Begin
    ) -> tuple[Prompt, SamplingParams, OutputSyntax]:
        """The prompt of a conversation, its sampling parameters, and the syntax of its answer. Raises ApiError."""
        chat_template, tools = self.chat_template, chat.tools
        if not chat_template.template:
            raise bad(_NO_TEXT, chat.param, "no_chat_template")
        messages, given = chat_template.told(chat.messages, tools, chat.template)
        prompt = self.prompt(messages, chat.new_tokens, self.tokens_max, begin, given, param=chat.param)
        check_least(params, prompt)
        answered = messages[-1].get("content") if given.get("continue_final_message") else None
        thinks, begun = chat_template.thoughts(prompt.tokens, answered)
        form = chat_template.format
        calls = form if tools.callable else None
        schemas = {tool.name: tool.parameters for tool in tools.callable}
        several = tools.parallel and tools.choice != "named"
        syntax = OutputSyntax(calls, thinks, begun, several, form.harmony, schemas, tools.is_forced)
        wanted = enforced_grammar(
            form, tools, chat.wanted, self.grammars, chat_template.thinking(thinks=thinks, begun=begun)
        )
        kept = () if syntax.is_plain else chat_template.special_markers
        return prompt, replace(params, structured_outputs=wanted, kept_special_tokens=kept), syntax

    def prompt(
        self,
        raw: Any,
        new_tokens: int | None,
        default: int,
        begin: Begin,
        template: Mapping[str, Any] = PLAINLY,
        param: str = "prompt",
    ) -> Prompt:
        """The tokens of a text, of tokens or of messages, checked to leave room for the answer. Raises ApiError.

        That the prompt is too long is said in Anthropic's words, by which LangChain and LiteLLM know such an error.
        """
        most, chat = self.max_prompt_tokens, param != "prompt"
        try:
            tokens = self.prompts.read(raw, most, begin, template)
        except PromptTooLong as error:
            count = error.what.removesuffix(" tokens")
            what = f"The prompt is too long: at most {most} tokens in {param!r}, and these are {count.rstrip(',')}."
            raise bad(what, param, "context_length_exceeded") from error
        except ApiError:
            raise
        except RequestError as error:
            raise bad(f"In {param!r}: {error}", param) from error
        room = self.tokens_max - len(tokens) + 1
        if new_tokens is not None and new_tokens > room:
            raise bad(
                f"The prompt is too long for such an answer: the longest sequence here is {self.tokens_max} tokens, "
                f"and one more that ends it. These are {len(tokens)} in {param!r}, and {new_tokens} more are asked "
                f"for: shorten {param!r}, or ask for at most {room}.",
                param,
                "context_length_exceeded",
            )
        text = raw if isinstance(raw, str) else "" if chat else self.decode(tokens)
        return Prompt(tokens, text, min(default, room) if new_tokens is None else new_tokens)

    def tokens(self, text: str, begin: Begin, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text. Raises ApiError."""
        try:
            return self.prompts.text(text, self.max_prompt_tokens, begin, add_special_tokens=add_special_tokens)
        except RequestError as error:
            raise bad(f"In 'prompt': {error}", "prompt") from error

    def decode(self, tokens: list[int], *, special: bool = False) -> str:
        """The text of tokens, with or without `special` ones; empty for a model without a tokenizer."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return str(text)


def check_least(params: SamplingParams, *prompts: Prompt) -> None:
    """Raises ApiError where `min_tokens` exceeds the length that the answer may have."""
    most = min(prompt.new_tokens_max for prompt in prompts)
    if params.min_tokens > max(1, most):
        raise bad(f"'min_tokens' is {params.min_tokens}, and an answer may have {most} tokens here.", "min_tokens")
