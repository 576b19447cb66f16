# ruff: noqa: T201  prints a transcript
"""Clients of other systems' verifier protocols, written from the protocols' descriptions: what they
send, what they retry, what they score.

Each takes a base URL as its own configuration would hold it, sends no header of ours, and knows
nothing of this project. `python tests/rewards/wire_clients.py BASE_URL` prints a transcript.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import httpx

MAX_RETRIES = 5
PAUSE_S = 0.05


class ArealFunctionClient:
    """AReaL's code function: a query is right if every element of `result` is true. Anything but a
    200 is tried again.
    """

    def __init__(self, domain: str, http: httpx.Client) -> None:
        path = "hapis/faas.hcs.io/v1/functions/realhf_code_verify/invoke"
        self._url = f"{domain}/{path}?waitTime=6000&requestId=1"
        self._http = http
        self.num_calls = 0

    def send(self, input_output: dict[str, Any], code: str, **more: Any) -> dict[str, Any]:
        problem = {"problem_id": "q", "input_output": json.dumps(input_output), "batche_index": 0}
        body = {
            "problem": problem, "code": code, "debug": False, "timeout": 6,
            "query_index": 0, **more,
        }  # fmt: skip
        for _ in range(MAX_RETRIES):
            self.num_calls += 1
            answer = self._http.post(self._url, json=body)
            if answer.status_code == 200:
                return dict(answer.json())
            time.sleep(PAUSE_S)
        raise RuntimeError(f"HTTP {answer.status_code}: {answer.text}")

    def is_right(self, input_output: dict[str, Any], code: str) -> bool:
        answer = self.send(input_output, code)
        return "result" in answer and all(value == True for value in answer["result"])  # noqa: E712  as that client does


class ArealCallClient:
    """AReaL's function calls: a query is right if every one of its requests has success; a
    SystemError is tried again.
    """

    def __init__(self, domain: str, http: httpx.Client, batch: int = 1) -> None:
        self._url, self._http, self._batch = f"{domain}/apis/functioncalls", http, batch
        self.num_calls = 0

    def send(
        self, testcases: list[dict[str, str]], code: str, function: str = "", **more: Any
    ) -> dict[str, Any]:
        body = {
            "uid": "[q-1]-[0-1]", "language": "PYTHON", "runtime": "python-default", "code": code,
            "entryFunction": function,
            "isFastFail": True, "isRemote": False, "testcases": testcases, "timeout": 9.0,
            "memory": 0, "query_index": 0, **more,
        }  # fmt: skip
        for _ in range(MAX_RETRIES):
            self.num_calls += 1
            answer = self._http.post(self._url, json=body)
            if answer.status_code == 200 and not any(
                r.get("errorType") == "SystemError" for r in answer.json()["results"]
            ):
                return dict(answer.json())
            time.sleep(PAUSE_S)
        raise RuntimeError(f"HTTP {answer.status_code}: {answer.text}")

    def is_right(self, input_output: dict[str, Any], code: str) -> bool:
        pairs = zip(input_output["inputs"], input_output["outputs"], strict=True)
        cases = [
            {"input": given.strip(), "expectedOutput": wanted.strip()} for given, wanted in pairs
        ]
        batches = [cases[i : i + self._batch] for i in range(0, len(cases), self._batch)]
        return all(
            self.send(batch, code, input_output.get("fn_name", "")).get("success", False)
            for batch in batches
        )


class SandboxFusionClient:
    """SandboxFusion as verl calls it: one request per test, outputs compared by the client; a 504
    is tried again, any other error ends it.
    """

    def __init__(self, url: str, http: httpx.Client) -> None:
        self._url, self._http = url, http

    def send(self, code: str, stdin: str, **more: Any) -> dict[str, Any]:
        body = {
            "compile_timeout": 10, "run_timeout": 10, "code": code, "stdin": stdin,
            "memory_limit_MB": 1024, "language": "python",
            "files": {}, "fetch_files": [], **more,
        }  # fmt: skip
        for _ in range(MAX_RETRIES):
            answer = self._http.post(
                self._url, content=json.dumps(body), headers={"content-type": "application/json"}
            )
            if answer.status_code != 504:
                answer.raise_for_status()
                return dict(answer.json())
            time.sleep(PAUSE_S)
        raise RuntimeError("still 504")

    def status(self, code: str, stdin: str, expected: str) -> bool | int:
        """True, False, -1 (sandbox), -2 (runtime error) or -3 (timeout)."""
        answer = self.send(code, stdin)
        run = answer["run_result"]
        if answer["status"] == "SandboxError":
            return -1
        if answer["status"] == "Failed":
            if run["status"] == "TimeLimitExceeded":
                return -3
            return -2 if run["status"] == "Error" or run["return_code"] != 0 else -1
        return bool(
            answer["status"] == "Success"
            and run["status"] == "Finished"
            and run["stdout"].rstrip("\n") == expected.rstrip("\n")
        )


SUMS = {"inputs": ["1 2\n", "3 4\n", "10 -3\n"], "outputs": ["3\n", "7\n", "7\n"]}
CALLS = {"inputs": ["[3, 1, 2]\n2", "[5]\n1"], "outputs": ["[3, 2]", "[5]"], "fn_name": "largest"}
PROGRAMS: list[tuple[str, dict[str, Any], str, bool]] = [
    ("right, standard input", SUMS, "a, b = map(int, input().split())\nprint(a + b)", True),
    ("wrong for one input", SUMS, "a, b = map(int, input().split())\nprint(a + abs(b))", False),
    ("raises", SUMS, "raise ValueError('no')", False),
    ("does not compile", SUMS, "def f(:", False),
    ("leaves early", SUMS, "import os\nos._exit(0)", False),
    (
        "right, class Solution",
        CALLS,
        (
            "class Solution:\n    def largest(self, xs: List[int], n: int):\n        return"
            " sorted(xs)[::-1][:n]"
        ),
        True,
    ),
    (
        "right, function",
        CALLS,
        "def largest(xs, n):\n    return sorted(xs, reverse=True)[:n]",
        True,
    ),
    ("wrong function", CALLS, "def largest(xs, n):\n    return xs[:n]", False),
    (
        "lies about equality",
        CALLS,
        "class L(list):\n    __eq__ = lambda s, o: True\ndef largest(xs, n):\n    return L()",
        False,
    ),
]


def transcript(base: str) -> None:
    """Print what each client sent and what it made of the answers. base: http://host:port/token/T."""
    with httpx.Client(timeout=60) as http:
        form_a, form_b, fusion = (
            ArealFunctionClient(base, http),
            ArealCallClient(base, http),
            SandboxFusionClient(f"{base}/run_code", http),
        )
        print("AReaL code function, POST /hapis/faas.hcs.io/v1/functions/realhf_code_verify/invoke")
        for name, problem, code, _ in PROGRAMS:
            print(f"  {name:24} -> {json.dumps(form_a.send(problem, code))}")
        print("AReaL function calls, POST /apis/functioncalls")
        for name, problem, code, _ in PROGRAMS:
            pairs = zip(problem["inputs"], problem["outputs"], strict=True)
            cases = [{"input": given, "expectedOutput": wanted} for given, wanted in pairs]
            print(
                f"  {name:24} -> {json.dumps(form_b.send(cases, code, problem.get('fn_name', '')))}"
            )
        print("SandboxFusion, POST /run_code")
        for name, problem, code, _ in PROGRAMS:
            if problem is SUMS:
                answer = fusion.send(code, problem["inputs"][2])
                print(f"  {name:24} -> {json.dumps(answer)}")


if __name__ == "__main__":
    transcript(sys.argv[1])
