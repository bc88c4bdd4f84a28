"""How models write tool calls and thoughts: the formats of common chat templates, under the names that vLLM has.

Owns what each format consists of. The chat template says which one a model was trained with (`of_template`).

    hermes      <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    mistral     [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]     or  [TOOL_CALLS]f[ARGS]{...}
    llama3_json {"name": "f", "parameters": {...}}; ...
    openai      <|channel|>commentary to=functions.f<|message|>{...}<|call|>      (gpt-oss: harmony)
    kimi_k2     <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    qwen3_coder <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    glm45       <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>          (glm47: without lines)
    minimax_m2  <minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

AUTO: Final = "auto"
INDEX: Final = "INDEX"
"""Stands in `ToolFormat.before` for the number of a call."""
REASONING: Final = (AUTO, "none", "deepseek_r1", "qwen3", "openai_gptoss")
"""How thoughts are written. `deepseek_r1`: an answer begins with them, unless the prompt says that there are none;
`qwen3`: where `<think>` stands, in the prompt or in the answer.
"""


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments as texts between tags: `opens`, in which KEY stands for a name, the value, `end`, `space`.

    name, key: patterns of what begins a call and a value, each with the name as its group. ends: any of them ends a
    call. closing: what may follow the last; again: what begins another within the same frame. lines: a value has lines
    to itself.
    """

    name: str
    key: str
    opens: str
    end: str
    ends: tuple[str, ...]
    space: str = ""
    closing: str = ""
    again: str = ""
    lines: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls: `opening` call `between` call `closing`. A call is `before`, arguments as JSON or between
    `tags`, `after`; NAME stands for the tool's name.

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
    tags: Tags | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts in which all stands that must be seen to find calls: with some tokenizers parts are special tokens."""
        tags = (self.tags.opens, self.tags.end, *self.tags.ends, self.tags.closing) if self.tags else ()
        head = self.header.replace("\\", "")
        return (self.before, self.after, self.opening, self.closing, *self.heads, *self.skipped, head, *tags)


_BEGIN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MISTRAL_NAME: Final = r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)"
_KIMI, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_ARGUMENT: Final = "<|tool_call_argument_begin|>"
_QWEN_TAGS: Final = Tags(
    r"\s*<function=\s*([^<>\s]+)\s*>", r"<parameter=\s*([^<>\n]+?)\s*>", "<parameter=KEY>\n", "</parameter>",
    ("</function>", "</tool_call>"), "\n", "</tool_call>", lines=True,
)  # fmt: skip
_GLM_MARKS: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
_GLM_ENDS: Final = ("</tool_call>",)
_GLM_NAME: Final = r"\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>)"
_GLM_KEY: Final = r"<arg_key>\s*([^<>\n]+?)\s*</arg_key>\s*<arg_value>"
_MINIMAX_TAGS: Final = Tags(
    r"""\s*<invoke\s+name=["']?([^<>\s"']+)["']?\s*>""", r"""<parameter\s+name=["']?([^<>\n"']+)["']?\s*>""",
    '<parameter name="KEY">', "</parameter>", ("</invoke>", "</minimax:tool_call>"), "\n", "</minimax:tool_call>",
    "<invoke",
)  # fmt: skip
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
            heads=("<|channel|>", "<|message|>"), skipped=("<|start|>", "<|end|>", "<|call|>", "<|return|>"),
            harmony=True,
        ),
        ToolFormat(
            "kimi_k2", f"<|tool_call_begin|>functions.NAME:{INDEX}{_ARGUMENT}", "<|tool_call_end|>", _KIMI, _KIMI, "",
            _KIMI_END, heads=("<|tool_call_begin|>",), skipped=("<|tool_call_end|>", _KIMI_END, _KIMI),
            header=rf"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*{re.escape(_ARGUMENT)}\s*(?=\{{)",
        ),
        ToolFormat(
            "qwen3_coder", "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", "<tool_call>", between="\n",
            heads=("<tool_call>",), skipped=("</tool_call>",), tags=_QWEN_TAGS,
        ),
        ToolFormat(
            "glm45", "<tool_call>NAME\n", "</tool_call>", "<tool_call>", between="\n",
            heads=("<tool_call>",), skipped=_GLM_MARKS,
            tags=Tags(_GLM_NAME, _GLM_KEY, "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>", _GLM_ENDS, "\n"),
        ),
        ToolFormat(
            "glm47", "<tool_call>NAME", "</tool_call>", "<tool_call>",
            heads=("<tool_call>",), skipped=_GLM_MARKS,
            tags=Tags(_GLM_NAME, _GLM_KEY, "<arg_key>KEY</arg_key><arg_value>", "</arg_value>", _GLM_ENDS),
        ),
        ToolFormat(
            "minimax_m2", '<invoke name="NAME">\n', "</invoke>\n", "<minimax:tool_call>", "<minimax:tool_call>\n", "",
            "</minimax:tool_call>", heads=("<minimax:tool_call>",), skipped=("</minimax:tool_call>",),
            tags=_MINIMAX_TAGS,
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


_MARKS: Final = {
    "[TOOL_CALLS]": "mistral",
    _KIMI: "kimi_k2",
    "<minimax:tool_call>": "minimax_m2",
    "<function=": "qwen3_coder",
}
"""What only the templates of one format have."""


def _guessed(template: str) -> str:
    if _BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    for mark, name in _MARKS.items():
        if mark in template:
            return name
    if "<arg_key>" in template:
        return "glm47" if "</arg_key><arg_value>" in template else "glm45"
    if "<|channel|>" in template and "functions." in template:
        return "openai"
    if "<tool_call>" not in template and "tools" in template and '"parameters"' in template:
        return "llama3_json"
    return "hermes"
