"""What a model's chat template supports: tools, reasoning, effort. For a template without tools it writes the tools
into the system message, and calls and their results as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from blake3 import blake3

from stowage.engine.detokenizer import special_tokens
from stowage.engine.sampling_params import Thinking
from stowage.server.tools.formats import AUTO, FORMATS, of_template
from stowage.server.tools.parser import THINK_BEGIN, THINK_END
from stowage.server.tools.request_tools import RequestTools

_TAIL_TOKENS: Final = 8
_INTRODUCTION: Final = """# Tools

You can call these functions. Each line describes one of them:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as JSON between <tool_call> and </tool_call>, like this:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


class ChatTemplate:
    """One model's chat template. `tool_parser` and `reasoning_parser`: names of formats; `auto`: detected."""

    def __init__(self, tokenizer: Any, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        self._tokenizer = tokenizer
        found: Any = getattr(tokenizer, "chat_template", None) or ""
        self.template = found if isinstance(found, str) else "\n".join(map(str, found.values()))
        self.format = of_template(self.template, tool_parser)
        if reasoning_parser == "openai_gptoss":
            self.format = FORMATS["openai"]
        self._knows_tools = "tools" in self.template
        self._forced = reasoning_parser == "deepseek_r1"
        tagged = reasoning_parser in ("deepseek_r1", "qwen3") or (
            reasoning_parser == AUTO and (THINK_END in self.template or THINK_BEGIN in self.template)
        )
        self._tagged = tagged and not self.format.harmony

    def knows(self, name: str) -> bool:
        """Whether the template uses a value of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.template) is not None

    @cached_property
    def special_markers(self) -> tuple[int, ...]:
        """Special tokens, which decoding leaves out by default, that calls and reasoning are found by."""
        written = "\n".join((*self.format.markers, THINK_BEGIN, THINK_END))
        texts = {token: str(self._tokenizer.decode([token])) for token in special_tokens(self._tokenizer)}
        return tuple(sorted(token for token, text in texts.items() if text.strip() and text.strip() in written))

    def told(
        self, messages: list[dict[str, Any]], tools: RequestTools, template: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The messages and values that the template is rendered with."""
        if self._knows_tools:
            described = [tool.described for tool in tools.tools]
            if not all(tool.description for tool in tools.tools) and self._joins_descriptions:
                described = [one | {"function": {"description": ""} | one["function"]} for one in described]
            if self.format.id_characters:
                messages = [_with_short_ids(message, self.format.id_characters) for message in messages]
            return messages, dict(template) | ({"tools": described} if described else {})
        return _in_words(messages, tools), dict(template)

    @cached_property
    def _joins_descriptions(self) -> bool:
        """Whether the template fails at a tool without a description, as Hermes' does, and takes an empty one."""
        return self._renders({"description": ""}) and not self._renders({})

    def _renders(self, said: dict[str, str]) -> bool:
        from jinja2 import TemplateError

        function = {"name": "f", **said, "parameters": {"type": "object", "properties": {}}}
        told = {"tools": [{"type": "function", "function": function}], "add_generation_prompt": True}
        try:
            self._tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False, **told)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError):
            return False
        return True

    def thoughts(self, prompt: list[int], answered: object = None) -> tuple[bool, bool]:
        """Whether an answer to this prompt may have reasoning, and whether it begins within it. ``answered``: the text
        of the message that it continues. A thought that is open there goes on; one that is over, or was none, stays so.
        """
        if not self._tagged:
            return False, False
        if isinstance(answered, str) and answered.strip():
            begun = answered.rfind(THINK_BEGIN) > answered.rfind(THINK_END)
            return begun, begun
        tail = str(self._tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)).rstrip()
        if tail.endswith(THINK_BEGIN):
            return True, True
        return not tail.endswith(THINK_END), self._forced and not tail.endswith(THINK_END)

    def thinking(self, *, thinks: bool, begun: bool) -> Thinking | None:
        """The tokens that enclose reasoning, for which no grammar holds; None: they are not single tokens."""
        begin, end = self._token(THINK_BEGIN), self._token(THINK_END)
        return Thinking(begin, end, begun) if thinks and begin is not None and end is not None else None

    def _token(self, text: str) -> int | None:
        found = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return int(found[0]) if len(found) == 1 else None


def _with_short_ids(message: dict[str, Any], characters: int) -> dict[str, Any]:
    """Mistral's templates refuse call ids of any other length, as other servers give: these become their digest."""

    def short(identity: str) -> str:
        if len(identity) == characters and identity.isalnum():
            return identity
        return blake3(identity.encode()).hexdigest()[:characters]

    if "tool_call_id" in message:
        message = message | {"tool_call_id": short(message["tool_call_id"])}
    if "tool_calls" in message:
        message = message | {"tool_calls": [call | {"id": short(call["id"])} for call in message["tool_calls"]]}
    return message


def _in_words(messages: list[dict[str, Any]], tools: RequestTools) -> list[dict[str, Any]]:
    """The messages for a template that knows roles and texts only."""
    told: list[dict[str, Any]] = []
    results = False
    for message in messages:
        content, role = message["content"], message["role"]
        if role == "tool":
            response = f"<tool_response>\n{content}\n</tool_response>"
            if results:
                told[-1]["content"] += "\n" + response
            else:
                told.append({"role": "user", "content": response})
        else:
            calls = [_written(call["function"]) for call in message.get("tool_calls", ())]
            told.append(
                {key: value for key, value in message.items() if key != "tool_calls"}
                | {"content": "\n".join([*([content] if content or not calls else []), *calls])}
            )
        results = role == "tool"
    if tools.tools:
        words = _INTRODUCTION.format(tools="\n".join(json.dumps(tool.described) for tool in tools.tools))
        if told[0]["role"] == "system":
            told[0] = told[0] | {"content": f"{told[0]['content']}\n\n{words}"}
        else:
            told.insert(0, {"role": "system", "content": words})
    return told


def _written(function: Mapping[str, Any]) -> str:
    return "<tool_call>\n" + json.dumps(dict(function), ensure_ascii=False) + "\n</tool_call>"
