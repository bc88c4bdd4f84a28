"""Which calls the grammar of a tool's schema takes, token by token: no server, and no model that writes them."""

from __future__ import annotations

from typing import Any

import pytest

from stowage.engine.engine import Engine
from stowage.errors import RequestError
from stowage.server.tools.formats import FORMATS
from stowage.server.tools.grammar import enforced_grammar
from stowage.server.tools.request_tools import Tool, checked_tools

TRIP = {
    "type": "object",
    "$defs": {"stay": {"type": "object", "properties": {"nights": {"type": "integer"}}, "required": ["nights"]}},
    "properties": {
        "to": {"type": "string"},
        "why": {"enum": ["work", "rest"]},
        "stays": {"type": "array", "items": {"$ref": "#/$defs/stay"}},
    },
    "required": ["to", "stays"],
}


STAYS = {"why": {"$ref": "#/$defs/why"}, "stays": TRIP["properties"]["stays"]}
DEFINED = {
    "trip": {
        "properties": {"to": {"$ref": "#/$defs/text"}},
        "required": ["to"],
        "allOf": [{"$ref": "#/$defs/stays"}],
        "additionalProperties": False,
    },
    "stays": {"properties": STAYS, "required": ["stays"]},
    "text": {"type": "string"},
    "why": TRIP["properties"]["why"],
}
REFERRED = {"$ref": "#/$defs/trip", "$defs": TRIP["$defs"] | DEFINED}
"""The same in parts that stand elsewhere."""


@pytest.mark.parametrize(
    ("name", "schema"),
    [("qwen3_coder", TRIP), ("glm45", TRIP), ("glm47", TRIP), ("minimax_m2", TRIP), ("qwen3_coder", REFERRED)],
)
def test_arguments_between_tags_are_enforced(name: str, schema: dict[str, Any], engine: Engine) -> None:
    """What templates write is what the grammar takes, whole; values that are not of the schema it does not take."""
    form = FORMATS[name]
    assert form.tags is not None
    tools = checked_tools((Tool("trip", "", schema, strict=False, where="tools[0]"),), "required", "", parallel=True)
    wanted = enforced_grammar(form, tools, None, engine.grammars, None)
    assert wanted is not None

    def call(**values: str) -> str:
        end = "\n" * form.tags.lines + form.tags.end + form.tags.space
        said = "".join(form.tags.opens.replace("KEY", key) + value + end for key, value in values.items())
        return form.before.replace("NAME", "trip") + said + form.after

    def takes(text: str) -> bool:
        state = engine.grammars.begin(wanted)
        try:
            for token in engine.tokenizer(text, add_special_tokens=False)["input_ids"]:
                state.accept(token)
        except RequestError:
            return False
        return text.endswith(form.closing or form.after)

    one, two = call(to='a < "b"\nc', stays='[{"nights": 2}]'), call(to="", why="rest", stays="[]")
    assert takes(form.opening + one + form.between + two + form.closing)
    assert not takes(form.opening + call(to="x") + form.closing), "stays must be there"
    assert not takes(form.opening + call(to="x", why="fun", stays="[]") + form.closing)
    assert not takes(form.opening + call(to="x", stays='[{"nights": "2"}]') + form.closing)
    assert not takes(form.opening + call(to="x", stays="[]", more="1") + form.closing)


def test_arguments_that_other_parts_of_a_schema_name(engine: Engine) -> None:
    """They were forbidden where the schema has `properties` too, so that such a tool was refused."""
    more = {"properties": {"nights": {"type": "integer"}}, "required": ["nights"]}
    schema = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"], "allOf": [more]}
    tools = checked_tools((Tool("trip", "", schema, strict=False, where="tools[0]"),), "required", "", parallel=True)
    wanted = enforced_grammar(FORMATS["hermes"], tools, None, engine.grammars, None)
    assert wanted is not None
    call = '<tool_call>\n{"name": "trip", "arguments": {"nights": 2, "to": "Rome"}}\n</tool_call>'
    state = engine.grammars.begin(wanted)
    assert all(state.try_accept(token) for token in engine.tokenizer(call, add_special_tokens=False)["input_ids"])
    early = engine.tokenizer(call.replace('"nights": 2, ', ""), add_special_tokens=False)["input_ids"]
    state = engine.grammars.begin(wanted)
    assert not all(state.try_accept(token) for token in early)
