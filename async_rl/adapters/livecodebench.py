"""LiveCodeBench's runner with our verdicts: `install(module)` replaces its `check_correctness`.

    from lcb_runner.evaluation import compute_code_generation_metrics as metrics
    install(metrics)  # or livecodebench.evaluation of NVIDIA's package

A program that cannot be judged stops the evaluation. The runner counts any Exception as a failure
of the program, so this one is a SystemExit.
"""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

from async_rl.adapters.grader import Grader
from async_rl.core.errors import InfrastructureError, at
from async_rl.core.io_pairs import read_input_output
from async_rl.core.types import Verdict

# The runner's own numbers, which it counts and prints.
_CODES = {Verdict.PASS: True, Verdict.WRONG_ANSWER: -2, Verdict.TIMEOUT: -3}
_RUNTIME_ERROR = -4
_COMPILE_ERROR = -1


def check_correctness(
    sample: dict[str, Any], generation: str, timeout: float, debug: bool = False
) -> tuple[list[bool | int], dict[str, Any]]:
    """Results up to the first failure in the runner's codes, and its reason."""
    with at("sample"):
        tests = read_input_output(sample["input_output"])
    grader = Grader(cpu_s=timeout)
    try:
        results = asyncio.run(grader.results(generation, tests))
    except InfrastructureError as error:
        raise SystemExit(str(error)) from error
    codes: list[bool | int] = []
    for result in results:
        is_compile_error = result.verdict is Verdict.COMPILE_ERROR
        code = _COMPILE_ERROR if is_compile_error else _RUNTIME_ERROR
        codes.append(_CODES.get(result.verdict, code))
    last = results[-1]
    metadata: dict[str, Any] = {"execution time": sum(result.cpu_s for result in results)}
    if last.verdict is not Verdict.PASS:
        metadata = {"error_code": codes[-1], "error_message": f"{last.verdict}: {last.message}"}
    return codes, metadata


def install(module: ModuleType) -> None:
    """Use our verdicts in `module`, the runner's compute_code_generation_metrics."""
    module.__dict__["check_correctness"] = check_correctness
