"""How models write tool calls and thoughts: the formats of common chat templates, under the names that vLLM has.

Owns what each format consists of. The chat template says which one a model was trained with (`of_template`).

    hermes      <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    mistral     [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]     or  [TOOL_CALLS]f[ARGS]{...}
    llama3_json {"name": "f", "parameters": {...}}; ...
    openai      <|channel|>commentary to=functions.f<|message|>{...}<|call|>      (gpt-oss: harmony)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["AUTO", "FORMATS", "REASONING", "ToolFormat", "of_template"]

AUTO: Final = "auto"
REASONING: Final = (AUTO, "none", "deepseek_r1", "qwen3", "openai_gptoss")
"""How thoughts are written. `deepseek_r1`: an answer begins with them, unless the prompt says that there are none;
`qwen3`: where `<think>` stands, in the prompt or in the answer.
"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls: `opening` call `between` call `closing`. A call is `before`, arguments as JSON, `after`;
    NAME stands for the tool's name.

    trigger: what calls begin with; empty: they are the whole answer. heads: what begins a call after another, skipped:
    what else may stand there. named: the name stands before the arguments, and `header` reads it; else both are in one
    JSON object. id_characters: of the identity of a call, which some templates check.
    """

    name: str
    before: str
    after: str
    trigger: str = ""
    opening: str = ""
    between: str = ""
    closing: str = ""
    heads: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    header: str = ""
    id_characters: int = 0
    harmony: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be seen to find calls: with some tokenizers these are special tokens."""
        return (self.trigger, *self.heads, *self.skipped)


_BEGIN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MISTRAL_NAME: Final = r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)"
_DEEPSEEK_ENDS: Final = ("```", _END, _CLOSE, _BEGIN)

FORMATS: Final[dict[str, ToolFormat]] = {
    form.name: form
    for form in (
        ToolFormat(
            "hermes", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "<tool_call>",
            between="\n", heads=("<tool_call>",), skipped=("}", "</tool_call>"),
        ),
        ToolFormat(
            "llama3_json", '{"name": "NAME", "parameters": ', "}", between="; ",
            heads=(), skipped=("}", ";", ",", "<|python_tag|>"),
        ),
        ToolFormat(
            "mistral", '{"name": "NAME", "arguments": ', "}", "[TOOL_CALLS]", "[TOOL_CALLS][", ", ", "]",
            heads=("[TOOL_CALLS]",), skipped=("}", ",", "[", "]"), header=_MISTRAL_NAME,
            id_characters=9,
        ),
        ToolFormat(
            "deepseek_v3", f"{_CALL}function{_SEP}NAME\n```json\n", f"\n```{_END}", _BEGIN, _BEGIN, "\n", _CLOSE,
            heads=(_CALL,), skipped=_DEEPSEEK_ENDS, header=rf"\w*{_SEP}\s*([\w.-]+)\s*```json\s*(?=\{{)",
        ),
        ToolFormat(
            "deepseek_v31", f"{_CALL}NAME{_SEP}", _END, _BEGIN, _BEGIN, "", _CLOSE,
            heads=(_CALL,), skipped=_DEEPSEEK_ENDS, header=rf"\s*([\w.-]+){_SEP}\s*(?=\{{)",
        ),
        ToolFormat(
            "openai", "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "",
            heads=("<|channel|>", "<|message|>"), harmony=True,
        ),
    )
}  # fmt: skip
_MISTRAL_NAMED: Final = ToolFormat(
    "mistral", "[TOOL_CALLS]NAME[ARGS]", "", "[TOOL_CALLS]", heads=("[TOOL_CALLS]",),
    skipped=FORMATS["mistral"].skipped, header=_MISTRAL_NAME, id_characters=9,
)  # fmt: skip


def of_template(template: str, name: str = AUTO) -> ToolFormat:
    """The format of a chat template, or the one that is named. A template that says nothing of calls is taken for one
    that knows none: then it is told of `hermes` in words.
    """
    if name == AUTO:
        name = _guessed(template)
    if name == "mistral" and "[ARGS]" in template:
        return _MISTRAL_NAMED
    return FORMATS[name]


def _guessed(template: str) -> str:
    if _BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|channel|>" in template and "functions." in template:
        return "openai"
    if "<tool_call>" not in template and "tools" in template and '"parameters"' in template:
        return "llama3_json"
    return "hermes"
