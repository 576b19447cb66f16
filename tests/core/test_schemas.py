"""The parts of a JSON schema that xgrammar ignores, by xgrammar's own verdict on a text that does
not fit the schema.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from async_rl.core.errors import DataError
from async_rl.core.schemas import ignored_parts, require_applied
from async_rl.core.support import Support

PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ITEM = {"$defs": {"x": {"type": "integer"}}}
# A schema, a value that does not fit it, and the parts that are ignored.
CASES: list[tuple[dict[str, Any], Any, list[str]]] = [
    (PERSON, {}, []),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1], []),
    ({"type": "string", "pattern": "^a+$"}, "b", []),
    ({"type": "string", "format": "uuid"}, "b", []),
    ({"type": ["integer", "null"], "maximum": 3}, 4, []),
    ({"type": "string", "enum": ["a"], "title": "t"}, "b", []),
    ({"anyOf": [{"const": 1}, PERSON]}, 2, []),
    ({**ITEM, "$ref": "#/$defs/x"}, "a", []),
    ({"properties": {"minLength": {"const": 1}}, "x": {"y": 1}}, {"minLength": 2}, []),
    ({"default": {"not": 1}, "type": "null"}, 1, []),
    ({"oneOf": [PERSON, {"type": "null"}], "discriminator": {}}, 2, []),
    ({"type": "number", "multipleOf": 1.5}, 1, ["#/multipleOf=1.5"]),
    ({"items": {"type": "null"}, "uniqueItems": True}, [None, None], ["#/uniqueItems=True"]),
    ({"minLength": 2}, "a", ["#/minLength=2"]),
    ({"type": "string", "format": "regex"}, "(", ["#/format='regex'"]),
    (
        {"type": "string", "pattern": "a+", "maxLength": 2},
        "aaa",
        ["#/maxLength=2"],
    ),
    ({"enum": ["a", "bc"], "minLength": 2}, "a", ["#/minLength=2"]),
    ({"type": "string", "anyOf": [{}]}, 1, ["#/type='string'"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1, ["#/oneOf="]),
    ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, 1, ["#/allOf=", "#/allOf/minimum=2"]),
    ({"$ref": "http://x/y"}, 1, ["#/$ref='http://x/y'"]),
    ({"not": {"type": "integer"}}, 1, ["#/not="]),
    ({"type": "object", "required": ["a"]}, {}, ["#/required=['a']"]),
    (
        {"type": "array", "items": {"$ref": "#/$defs/x"}, **ITEM, "contains": {"const": 1}},
        [2],
        ["#/contains="],
    ),
    (
        {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]},
        {"a": 1},
        ["#/properties/a/not={}"],
    ),
    ({"anyOf": [{"type": "number", "multipleOf": 2}]}, 3, ["#/anyOf/multipleOf=2"]),
]


@pytest.mark.parametrize(("schema", "misfit", "ignored"), CASES)
def test_the_parts_that_xgrammar_ignores_are_named(
    schema: dict[str, Any], misfit: Any, ignored: list[str]
) -> None:
    made = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    is_accepted = xgrammar.testing._is_grammar_accept_string(made, json.dumps(misfit))
    assert is_accepted == bool(ignored)
    found = list(ignored_parts(schema))
    assert len(found) == len(ignored)
    assert all(map(str.startswith, found, ignored)), found


def test_a_schema_inside_a_tag_is_read_and_values_of_other_types_are_ignored_parts() -> None:
    bad = {"type": "integer", "multipleOf": 5}
    elements = [{"type": "const_string", "value": "a"}, {"type": "json_schema", "json_schema": bad}]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    for grammar in (bad, tag):
        with pytest.raises(DataError, match=r"#/multipleOf=5, which the .* prompt$"):
            require_applied(Support(grammar=json.dumps(grammar)))
    del bad["multipleOf"]
    for grammar in (json.dumps(tag), "(a|b)", 'root ::= "a"', ""):
        require_applied(Support(grammar=grammar))
    for name in ("required", "properties", "allOf", "oneOf", "format", "type"):
        for value in (7, [[{}]]):
            assert list(ignored_parts({"required": [[]], name: value, "minLength": {}}))
