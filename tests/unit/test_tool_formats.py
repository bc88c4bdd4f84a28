"""What models write becomes texts, thoughts and calls, the same however it is cut; what is none of them stays text."""

from __future__ import annotations

import json
import random

import pytest

from stowage.server.tools.formats import FORMATS, of_template
from stowage.server.tools.incremental_parser import Part
from stowage.server.tools.parser import OutputParser, OutputSyntax

DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
NESTED = '{"a": "}{\\"", "b": [1, {}]}'
TWO = [("call", "f"), ("arguments", NESTED), ("call", "g"), ("arguments", "{}")]
CHANNEL = "<|channel|>{}<|message|>{}"
HEAD = "commentary to=functions.f <|constrain|>json"

SCHEMAS = {
    "f": {"properties": {"a": {"type": "string"}, "b": {"type": "array"}, "c": {"type": "boolean"}}},
    "g": {"properties": {"n": {"type": ["string", "null"]}, "o": {"anyOf": [{"type": "object"}, {"type": "null"}]}}},
}
QUOTED = 'x < 1 </p "\\\n\n'
ARGUMENTS = json.dumps({"a": QUOTED, "b": [1, "</"], "c": True})
MIXED = '{"n": "1", "o": null}'
TAGGED = [("content", "Look: "), ("call", "f"), ("arguments", ARGUMENTS), ("call", "g"), ("arguments", MIXED)]
QWEN = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
LINES = "<parameter={}>\n{}\n</parameter>\n"
GLM = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
INVOKE, VALUE = '<invoke name="{}">\n{}</invoke>\n', '<parameter name="{}">{}</parameter>\n'
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
FIRST, SECOND = (("a", QUOTED), ("b", '[1, "</"]'), ("c", "True")), (("n", "1"), ("o", "null"))


def tagged(pattern: str, values: tuple[tuple[str, str], ...]) -> str:
    return "".join(pattern.format(*one) for one in values)


CASES = [
    (
        "qwen3_coder",
        "Look: " + QWEN.format("f", tagged(LINES, FIRST)) + "\n" + QWEN.format("g", tagged(LINES, SECOND)),
        TAGGED,
    ),
    ("qwen3_coder", QWEN.format("f", ""), [("call", "f"), ("arguments", "{}")]),
    ("qwen3_coder", QWEN.format("h", tagged(LINES, (("a", "NaN"), ("b", "7")))),
     [("call", "h"), ("arguments", '{"a": "NaN", "b": 7}')]),
    ("qwen3_coder", "<tool_call><function=f>odd<parameter=a>1</parameter><b></tool_call>So",
     [("call", "f"), ("arguments", '{"a": "1"}'), ("content", "So")]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nhal", [("call", "f"), ("arguments", '{"a": "hal')]),
    ("qwen3_coder", "a <tool_call> is a tag", [("content", "a <tool_call> is a tag")]),
    (
        "glm45",
        f"Look: <tool_call>f\n{tagged(GLM, FIRST)}</tool_call>\n<tool_call>g\n{tagged(GLM, SECOND)}</tool_call>",
        TAGGED,
    ),
    ("glm47", "<tool_call>f</tool_call><tool_call>g<arg_key>o</arg_key><arg_value>{}</arg_value></tool_call>",
     [("call", "f"), ("arguments", "{}"), ("call", "g"), ("arguments", '{"o": {}}')]),
    (
        "minimax_m2",
        "Look: <minimax:tool_call>\n" + INVOKE.format("f", tagged(VALUE, FIRST))
        + INVOKE.format("g", tagged(VALUE, SECOND)) + "</minimax:tool_call>",
        TAGGED,
    ),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|>{KIMI.format('f', 0, NESTED)}"
        f"{KIMI.format('g', 1, '{}')}<|tool_calls_section_end|>",
        TWO,
    ),
    (
        "hermes",
        f'Look: <tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        [("content", "Look: "), *TWO],
    ),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "g"}', [("call", "g"), ("arguments", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', [("call", "f"), ("arguments", '{"a')]),
    ("hermes", '<tool_call>{"name": "\\u0066", "arguments": {}}', [("call", "f"), ("arguments", "{}")]),
    ("hermes", "<tool_call> odd </tool_call> x <tool_c", [("content", "<tool_call>odd </tool_call> x <tool_c")]),
    ("hermes", "at the end <tool_call>", [("content", "at the end <tool_call>")]),
    ("hermes", '{"name": "f", "arguments": {}}', [("content", '{"name": "f", "arguments": {}}')]),
    ("llama3_json", f'{{"name": "f", "parameters": {NESTED}}}; {{"name": "g", "parameters": {{}}}}', TWO),
    ("llama3_json", f'<|python_tag|>{{"name": "f", "parameters": {NESTED}}}', TWO[:2]),
    ("llama3_json", '{"ship": {"name": "f"}}', [("content", '{"ship": {"name": "f"}}')]),
    ("llama3_json", " Hello {", [("content", " Hello {")]),
    ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {NESTED}}}, {{"name": "g", "arguments": {{}}}}]', TWO),
    ("mistral", f"x[TOOL_CALLS]f[ARGS]{NESTED}[TOOL_CALLS]g{{}}", [("content", "x"), *TWO]),
    ("deepseek_v3", DEEPSEEK.format(V3.format("f", NESTED) + "\n" + V3.format("g", "{}")), TWO),
    ("deepseek_v31", DEEPSEEK.format(V31.format("f", NESTED) + V31.format("g", "{}")), TWO),
    (
        "openai",
        CHANNEL.format("analysis", "Hm.") + "<|end|><|start|>assistant" + CHANNEL.format(HEAD, NESTED),
        [("reasoning", "Hm."), *TWO[:2]],
    ),
    (
        "openai",
        CHANNEL.format("analysis", "Hm.") + "<|end|><|start|>assistant" + CHANNEL.format("final", "Yes."),
        [("reasoning", "Hm."), ("content", "Yes.")],
    ),
    ("openai", "no channel", [("content", "no channel")]),
]  # fmt: skip
HERMES = next(case for case in CASES if case[0] == "hermes")


def read(
    syntax: OutputSyntax, text: str, cuts: random.Random | None = None, *, is_cut: bool = False
) -> list[tuple[str, str]]:
    parser, at, parts = OutputParser(syntax), 0, list[Part]()
    while at < len(text):
        end = len(text) if cuts is None else at + cuts.choice((1, 1, 2, 3, 9))
        parts += parser.push(text[at:end])
        at = end
    found: list[tuple[str, str]] = []
    for part in parts + parser.finish(is_cut=is_cut):
        if found and found[-1][0] == part.kind != "call":
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_of_a_call_that_is_cut_no_half_is_text(name: str, text: str, parts: list[tuple[str, str]]) -> None:
    """Wherever the limit of tokens falls: what was written before the call, its name, its arguments so far."""
    form = FORMATS[name]
    syntax = OutputSyntax(form, harmony=form.harmony, schemas=SCHEMAS)
    names = [said for kind, said in parts if kind == "call"]
    if not names or "odd" in text:
        return
    whole = next((said for kind, said in parts if kind == "content"), "")
    begins = text.index(form.trigger or ("to=" if form.harmony else '"name": "')) + max(len(form.trigger), 9)
    for end in range(begins, len(text)):
        for chance in (None, random.Random(end)):
            found = read(syntax, text[:end], chance, is_cut=True)
            assert "".join(said for kind, said in found if kind == "content") == whole, text[:end]
            called = [said for kind, said in found if kind == "call"]
            assert called == names[: len(called)], text[:end]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"name": "f", "para', [("call", "f")]),
        ('{"name": "f', []),
        ('{"name": "', []),
        ('{"name": "Ada", "bo', [("content", '{"name": "Ada", "bo')]),
        ('{"na', [("content", '{"na')]),
    ],
)
def test_where_nothing_marks_a_call_the_name_of_a_tool_does(text: str, parts: list[tuple[str, str]]) -> None:
    """An answer that is JSON, and is cut, stays one."""
    assert read(OutputSyntax(FORMATS["llama3_json"], schemas=SCHEMAS), text, is_cut=True) == parts


def test_arguments_between_tags_whose_schema_is_elsewhere() -> None:
    """As Pydantic writes it for enumerations and for models that contain themselves."""
    grade = {"enum": ["1", "2"], "type": "string"}
    node = {
        "type": "object",
        "properties": {
            "grade": {"$ref": "#/$defs/Grade"},
            "best": {"anyOf": [{"$ref": "#/$defs/Grade"}, {"type": "null"}]},
            "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
        },
    }
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]}
    node["properties"]["loop"] = {"$ref": "#/$defs/Loop"}
    schema = {"$ref": "#/$defs/Node", "$defs": {"Node": node, "Grade": grade, "Loop": loop}}
    syntax = OutputSyntax(FORMATS["qwen3_coder"], schemas={"f": schema})
    text = QWEN.format("f", tagged(LINES, (("grade", "1"), ("best", "2"), ("next", '{"grade": "1"}'), ("loop", "3"))))
    said = '{"grade": "1", "best": "2", "next": {"grade": "1"}, "loop": 3}'
    assert read(syntax, text) == [("call", "f"), ("arguments", said)]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_parts_of_an_answer(name: str, text: str, expected: list[tuple[str, str]]) -> None:
    syntax = OutputSyntax(FORMATS[name], harmony=name == "openai", schemas=SCHEMAS)
    assert read(syntax, text) == expected
    for seed in range(100):
        assert read(syntax, text, random.Random(seed)) == expected, seed


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\nwhy</think>\n\nHello", False, [("reasoning", "\nwhy"), ("content", "Hello")]),
        ("why</thin</think>Hello", True, [("reasoning", "why</thin"), ("content", "Hello")]),
        ("Hello <think>", False, [("content", "Hello <think>")]),
        ("why", True, [("reasoning", "why")]),
        ("<think>a</think>\n" + HERMES[1], False, [("reasoning", "a"), ("content", "Look: "), *TWO]),
        ('<think><tool_call>{"name": "f"', False, [("reasoning", '<tool_call>{"name": "f"')]),
    ],
)
def test_thoughts(text: str, begun: bool, expected: list[tuple[str, str]]) -> None:
    syntax = OutputSyntax(FORMATS["hermes"], thinks=True, begun=begun)
    for cuts in (None, *map(random.Random, range(50))):
        assert read(syntax, text, cuts) == expected


def test_only_the_first_call_counts_where_one_is_wanted() -> None:
    assert read(OutputSyntax(FORMATS["hermes"], parallel=False), HERMES[1]) == HERMES[2][:3]


def test_random_texts_lose_nothing_but_markers() -> None:
    """Whatever a model writes comes out, but for what calls and channels consist of."""
    chance = random.Random(3)
    words = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", ',
        '"arguments": ',
        "{",
        "}",
        '"',
        "\\",
        "[TOOL_CALLS]",
        "x",
        "[",
        "<",
    ]
    for name in FORMATS:
        syntax = OutputSyntax(FORMATS[name], thinks=name != "openai", harmony=name == "openai")
        for _ in range(300):
            text = "".join(chance.choices(words, k=chance.randrange(1, 9)))
            whole = read(syntax, text)
            assert read(syntax, text, chance) == whole
            assert not ("x" in text and name != "openai" and not any("x" in part for _, part in whole)), (
                name,
                text,
                whole,
            )


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ('{{ tools }} {"name": x, "parameters": y} <|python_tag|>', "llama3_json"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|channel|>analysis functions.", "openai"),
        ("{{ messages }}", "hermes"),
        ("{{ tools }}<tool_call>\n<function=example_function_name>\n<parameter=", "qwen3_coder"),
        ("{{ tools }}<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>", "glm45"),
        ("{{ tools }}<tool_call>{name}<arg_key>{key}</arg_key><arg_value>", "glm47"),
        ('{{ tools }}<minimax:tool_call>\n<invoke name="', "minimax_m2"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi_k2"),
    ],
)
def test_the_template_says_which_format(template: str, name: str) -> None:
    assert of_template(template).name == name
    assert of_template(template, "mistral").name == "mistral"
