"""Facts about `async-rl verifier` and `async-rl verify`, from the outside."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tables import table
from typer.testing import CliRunner, Result

from async_rl.core.errors import DataError
from async_rl.launchers.cli import application

SQUARE = {"tests": [{"kind": "call", "function": "f", "args": [3], "expected": 9}]}
BODY = {"code": "def f(x): return x * x", "language": "python", **SQUARE}


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """(process, its URL, its first lines) of a verifier on a free port."""
    command = [sys.executable, "-m", "async_rl.launchers.cli", "verifier", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        yield process, re.search(r"http://\S+", first).group(), first  # type: ignore[union-attr]
    finally:
        process.kill()
        process.communicate()


def test_server_alone_makes_a_token_answers_and_ends_well_at_sigterm(async_rl: Any) -> None:
    with running("verifiers.cells=1", "sandbox.timeout_s=1") as (process, url, first):
        assert first.startswith("verifier at http://127.0.0.1:")
        assert process.stdout is not None
        token = process.stdout.readline().removeprefix("token ").strip()
        assert len(token) >= 32
        assert httpx.get(f"{url}/token/{token}/health").json()["cells"] == 1
        assert httpx.get(f"{url}/token/{'x' * len(token)}/health").status_code == 401
        with httpx.Client(base_url=url, timeout=60) as http:
            headers = {"authorization": f"Bearer {token}"}
            assert http.post("/verify", json=BODY).status_code == 401
            assert http.post("/verify", json=BODY, headers=headers).json()["verdict"] == "pass"
            endless = {**BODY, "code": "while True: pass"}
            answer = http.post("/verify", json=endless, headers=headers).json()
            assert answer["tests"][0]["message"].endswith("1 s of CPU time")
        code, _, err = async_rl("verifier", "--port", url.rpartition(":")[2])
        assert code == 2
        said = r"error: 127.0.0.1:\d+ cannot be bound \(Address already in use\); choose an.*\n"
        assert re.fullmatch(said, err)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert "all admitted requests are answered" in out


def verify(tmp_path: Path, rows: list[dict[str, Any]], *arguments: str) -> Result:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CliRunner().invoke(application(), ["verify", str(path), "verifiers.cells=1", *arguments])


def test_completions_are_scored_and_summed_up(tmp_path: Path) -> None:
    rows = table(__file__, "completions")
    result = verify(tmp_path, rows, "--output", str(tmp_path / "out.jsonl"))
    assert result.exit_code == 0, result.output
    assert re.search(r"pass +3 +50.0%", result.stdout)
    assert "pass@1 0.7500 over 3 problems" in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    verdicts = ["pass", "wrong_answer", "pass", "compile_error", "runtime_error", "pass"]
    names = ["a", *(f"b, {number} of 4" for number in range(1, 5)), "c"]
    assert {line["name"]: line["verdict"] for line in lines} == dict(
        zip(names, verdicts, strict=True)
    )


def test_a_row_that_cannot_be_judged_is_listed_and_is_no_wrong_program(tmp_path: Path) -> None:
    rows = [
        {"id": "empty", "tests": [], "completion": "x = 1"},
        {"id": "a", **SQUARE, "completion": "f = 1"},
    ]
    result = verify(tmp_path, rows)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"empty: test_error: {tmp_path}/rows.jsonl, row 1: ")
    assert "pass@1 0.0000 over 1 problems" in result.stdout


def test_a_file_without_programs_is_an_error_and_no_file_is_written_over(tmp_path: Path) -> None:
    result = verify(tmp_path, [{"id": "a", **SQUARE}])
    assert isinstance(result.exception, DataError)
    assert "none of completions, completion, responses, response" in str(result.exception)
    assert os.listdir(tmp_path) == ["rows.jsonl"]
    kept = tmp_path / "out.jsonl"
    kept.write_text("mine")
    row = {"id": "a", **SQUARE, "completion": "def f(x): return x * x"}
    result = verify(tmp_path, [row], "--output", str(kept))
    assert isinstance(result.exception, FileExistsError)
    assert kept.read_text() == "mine"
