"""The parts of a JSON schema that xgrammar ignores, by xgrammar's own verdict on a text that does
not fit the schema.
"""

import json
from typing import Any

import pytest
import xgrammar
from tables import table

from async_rl.core.calls import Support
from async_rl.core.errors import DataError
from async_rl.core.schemas import ignored_parts, require_applied


@pytest.mark.parametrize(("schema", "misfit", "ignored"), table(__file__, "ignored_parts"))
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
