"""Clients of other systems' verifier protocols, written from the protocols' descriptions: what they
send, what they retry, what they score.

They send no header of ours, and know nothing of this project.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

MAX_RETRIES = 5
PAUSE_S = 0.05


class Client(httpx.Client):
    """An HTTP client that knows the base URL: http://host:port/token/T."""

    def __init__(self, base: str) -> None:
        super().__init__(base_url=base, timeout=60, trust_env=False)
        self.base = base


class ArealFunctionClient:
    """AReaL's code function: a query is right if every element of `result` is true. Anything but a
    200 is tried again.
    """

    def __init__(self, http: Client) -> None:
        path = "/hapis/faas.hcs.io/v1/functions/realhf_code_verify/invoke"
        self._url = f"{path}?waitTime=6000&requestId=1"
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

    def __init__(self, http: Client, batch: int = 1) -> None:
        self._url, self._http, self._batch = "/apis/functioncalls", http, batch
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

    def __init__(self, http: Client) -> None:
        self._url, self._http = "/run_code", http

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
_ROWS = yaml.safe_load(Path(__file__).with_name("wire_forms.yaml").read_text())["programs"]
PROGRAMS: list[tuple[str, dict[str, Any], str, bool]] = [
    (name, SUMS if problem == "sums" else CALLS, code, is_right)
    for name, problem, code, is_right in _ROWS
]
