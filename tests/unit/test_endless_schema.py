"""Schemas of which nothing that ends can be: found, with the reference; all others are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from stowage.engine.endless_schema import endless

NODE: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {"$defs": {"tree": TREE | {"required": ["children"]}}, "$ref": "#/$defs/tree"},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": [1]}}, "$ref": "#/$defs/a"},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.org/x"},
        {"properties": {"x": {"$ref": "#"}}},
        {"$defs": {"a": {"$anchor": "a", "type": "integer"}}, "$ref": "#a"},
        {"anyOf": [{"$ref": "#/anyOf/1"}, {"type": "integer"}]},
        {"anyOf": [{"$ref": "#/anyOf/2"}, {"$ref": "#/anyOf/x"}]},
    ],
)
def test_what_ends(schema: Any) -> None:
    assert endless(schema) == ""


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({"$defs": {"node": NODE | {"required": ["next"]}}, "$ref": "#/$defs/node"}, "#/$defs/node"),
        ({"properties": {"x": {"$ref": "#"}}, "required": ["x"]}, "#"),
        ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "#/$defs/a"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/b"}, "#/$defs/b"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "#"),
        ({"anyOf": [NODE | {"properties": {"next": {"$ref": "#/anyOf/0"}}, "required": ["next"]}]}, "#/anyOf/0"),
        ({"$defs": {"a b": {"allOf": [{"$ref": "#/$defs/a%20b"}]}}, "$ref": "#/$defs/a%20b"}, "#/$defs/a%20b"),
    ],
)  # fmt: skip
def test_what_never_ends(schema: Any, reference: str) -> None:
    assert endless(schema) == reference


def test_a_way_out_that_is_found_late() -> None:
    """a needs b, b needs a or c, c ends: whatever order they are looked at in."""
    a, b = {"$ref": "#/$defs/b"}, {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}]}
    for first in ("a", "b", "c"):
        assert endless({"$defs": {"a": a, "b": b, "c": {"type": "integer"}}, "$ref": f"#/$defs/{first}"}) == ""
