"""Rows in the layouts of public data sets: each is read, and judges a right and a wrong program."""

import base64
import json
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from composing import compose_unchecked
from rewards_support import Jail

from async_rl.core.errors import DataError
from async_rl.core.types import Verdict
from async_rl.data.drafts import Draft, Drafter
from async_rl.data.problems import layout_of, unfolded
from async_rl.rewards.verifier.protocol import VerifyRequest
from benchmarks.embedded import corpus
from benchmarks.embedded.vocabulary import build_tokenizer

CASES = yaml.safe_load(Path(__file__).with_name("field_rows.yaml").read_text())
JUDGED = [case for case in CASES if "refused" not in case]


def filled(value: Any) -> Any:
    """The value with the texts that field_rows.yaml describes."""
    if isinstance(value, list):
        return [filled(each) for each in value]
    if not isinstance(value, dict):
        return value
    value = {key: filled(each) for key, each in value.items()}
    match value:
        case {"json": content}:
            return json.dumps(content)
        case {"packed": content}:
            packed = zlib.compress(pickle.dumps(json.dumps(content)))
            return base64.b64encode(packed).decode()
    return value


def drafted(case: dict[str, Any]) -> Draft | DataError:
    tokenizer = build_tokenizer(corpus.vocabulary_text(), 512)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = ["data.train_files=[x.jsonl]", f"sandbox.packages={case.get('packages', [])}"]
    drafter = Drafter(["x.jsonl"], compose_unchecked("grpo_code", settings), tokenizer)
    return drafter.draft("x.jsonl", 1, ("x.jsonl, row 1", filled(case["row"])))


@pytest.mark.parametrize("case", JUDGED, ids=[case["source"] for case in JUDGED])
def test_a_row_judges_a_right_and_a_wrong_program(jail: Jail, case: dict[str, Any]) -> None:
    draft = drafted(case)
    assert isinstance(draft, Draft), draft
    layout = layout_of(unfolded(filled(case["row"])))
    assert layout is not None
    assert layout.name == case["layout"]
    assert case.get("shows", "") in draft.text
    tests, setup = draft.problem.tests, draft.problem.setup
    for program, verdicts in (
        (case["right"], {Verdict.PASS}),
        (case["wrong"], {Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR}),
    ):
        request = VerifyRequest(code=program, tests=tests, setup=setup, timeout_s=5, memory_mb=512)
        response = jail.verify(request)
        assert response.verdict in verdicts, response.tests


REFUSED = [case for case in CASES if "refused" in case]


@pytest.mark.parametrize("case", REFUSED, ids=[case["source"] for case in REFUSED])
def test_a_row_that_cannot_be_judged_is_refused_with_its_place_and_reason(
    case: dict[str, Any],
) -> None:
    draft = drafted(case)
    assert isinstance(draft, DataError)
    assert re.search(rf"^x\.jsonl, row 1: .*{case['refused']}", str(draft)), draft
