"""The public attack suite: programs that try to be graded as if they solved their task, run against
any grader that speaks a known form.

The programs are data (`attacks.toml`). `Form` is the form of request of a grader. Outcomes:
*forged*, the grader accepts a program that does not solve the task; *held*, it does not; *crashed*,
it returns no verdict in time or reports that it could not judge. For an honest program a right
verdict is held and a wrong one forged.
"""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from async_rl.core.frozen import frozen

ANSWER_S = 60.0
"""A grader that needs longer for a program with a limit of TIMEOUT_S has crashed."""
TIMEOUT_S = 2.0
_HONEST = "honest"
_NUMBERS = (3, 4)


class Outcome(enum.StrEnum):
    """The outcome of one attack on a grader."""

    HELD = "held"
    FORGED = "forged"
    CRASHED = "crashed"


@frozen
class Attack:
    """One program. kinds: the forms of test that it attacks; language: as every form knows it."""

    family: str
    name: str
    kinds: Sequence[str]
    code: str
    language: str = "python"


@frozen
class Trial:
    """One program against one form of test."""

    attack: Attack
    kind: str
    outcome: Outcome
    reason: str


def attacks() -> list[Attack]:
    """The programs of the suite."""
    text = Path(__file__).with_name("attacks.toml").read_text(encoding="utf-8")
    return [Attack(**row) for row in tomllib.loads(text)["attack"]]


_ASSERTS = {
    "assert": "\n".join(f"assert f({n}) == {n * n}" for n in _NUMBERS),
    "judged": "def h(x):\n    return f(x)\n"
    + "\n".join(f"assert h({n}) == {n * n}" for n in _NUMBERS),
    "named": "assert f(2) == list(range(2))\nassert f(3) == helper(3)",
}
_CHECKER = """
import sys
number = int(open(sys.argv[1]).read())
sys.exit(42 if sys.stdin.read().split() == [str(number ** 2)] else 43)
"""
_SETUP = "def helper(x):\n    return list(range(x))"


def _own(kind: str, code: str, language: str) -> tuple[str, dict[str, Any]]:
    tests: list[dict[str, Any]]
    match kind:
        case "call":
            tests = [
                {"kind": "call", "function": "f", "args": [n], "expected": n * n} for n in _NUMBERS
            ]
        case "stdin":
            tests = [{"kind": "stdin", "input": f"{n}\n", "output": str(n * n)} for n in _NUMBERS]
        case "checked":
            checker = {"code": _CHECKER, "form": "kattis"}
            tests = [
                {"kind": "stdin", "input": f"{n}\n", "output": "", "checker": checker}
                for n in _NUMBERS
            ]
        case _:
            tests = [{"kind": "assert", "code": _ASSERTS[kind]}]
    return "/verify", {
        "code": code, "language": language, "tests": tests, "setup": _SETUP, "timeout_s": TIMEOUT_S,
    }  # fmt: skip


def _function_calls(kind: str, code: str, language: str) -> tuple[str, dict[str, Any]]:
    cases = [{"input": f"{n}\n", "expectedOutput": str(n * n)} for n in _NUMBERS]
    function = "f" if kind == "call" else ""
    return "/apis/functioncalls", {
        "uid": "attack", "language": language.upper(), "code": code, "entryFunction": function,
        "testcases": cases, "timeout": TIMEOUT_S, "isFastFail": True,
    }  # fmt: skip


def _run_code(kind: str, code: str, language: str) -> tuple[str, dict[str, Any]]:
    body = {"code": code, "language": language, "stdin": "3\n", "run_timeout": TIMEOUT_S}
    return "/run_code", body


@dataclass(frozen=True, slots=True)
class Form:
    """A form of request to a grader. kinds: the kinds of test that it can express."""

    request: Any
    kinds: tuple[str, ...]


FORMS = {
    "verify": Form(_own, ("call", "stdin", "assert", "judged", "named", "checked")),
    "functioncalls": Form(_function_calls, ("call", "stdin")),
    "run_code": Form(_run_code, ("stdin",)),
}


def _verdict(form: str, answer: dict[str, Any]) -> bool | None:
    """True if the grader calls the program right, None if it could not judge."""
    match form:
        case "verify":
            verdict = answer["verdict"]
            return None if verdict in ("infrastructure_error", "test_error") else verdict == "pass"
        case "functioncalls":
            errors = [result.get("errorType") for result in answer["results"]]
            return None if "SystemError" in errors else bool(answer["success"])
    result = answer["run_result"] or {"stdout": ""}  # of a program that does not compile
    return answer["status"] == "Success" and str(result["stdout"]).strip() == "9"


def run(url: str, form: str, token: str) -> Iterator[Trial]:
    """Ask the grader about every program, one after the other."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(headers=headers, timeout=ANSWER_S, trust_env=False) as http:
        for attack in attacks():
            for kind in attack.kinds:
                # /run_code has one input: a constant is right there.
                is_possible = form != "run_code" or attack.family != "wrong answers"
                if kind in FORMS[form].kinds and is_possible:
                    trial = _try(http, url.rstrip("/"), form, attack, kind)
                    if trial is not None:
                        yield trial


def _try(http: httpx.Client, url: str, form: str, attack: Attack, kind: str) -> Trial | None:
    """One trial; None if the grader refuses this form of test."""
    path, body = FORMS[form].request(kind, attack.code, attack.language)
    outcome, reason = Outcome.CRASHED, ""
    try:
        reply = http.post(url + path, json=body)
        if reply.status_code == httpx.codes.BAD_REQUEST:
            return None
        reply.raise_for_status()
        is_right = _verdict(form, reply.json())
        if is_right is not None:
            outcome = Outcome.HELD if is_right == (attack.family == _HONEST) else Outcome.FORGED
    except (httpx.HTTPError, ValueError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
    return Trial(attack=attack, kind=kind, outcome=outcome, reason=reason)
