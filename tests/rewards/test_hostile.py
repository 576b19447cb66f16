from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpus_table import LEVELS, Host, can_become_other, other_user, request_of
from hostile_programs import CASES, HONEST, Case
from rewards_support import Jail

from async_rl.core.types import CallTest, Verdict
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.sandbox.protocol import LANDLOCK


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("host"))
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.name}")
def test_hostile_program_gets_its_right_verdict(jail: Jail, host: Host, case: Case) -> None:
    with host.unchanged(case.name):
        response = jail.verify(request_of(case))
        assert response.verdict in case.right, response
    # The cell is unharmed: an honest program passes in it, and nothing the hostile one wrote is
    # left.
    after = jail.verify(
        VerifyRequest(
            code="import os\ndef f(x):\n    return os.listdir('.') or 9",
            tests=[CallTest(function="f", args=[3], expected=9)],
        )
    )
    if jail.cells.level != LANDLOCK:
        assert after.verdict is Verdict.PASS, after
    assert jail.cells.num_replaced == 0


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_honest_program_passes(jail: Jail, case: Case) -> None:
    if case.name == "scratch file" and jail.cells.level == LANDLOCK:
        pytest.skip("the scratch needs namespaces")
    response = jail.verify(request_of(case))

    assert response.verdict is Verdict.PASS, response


def test_corpus_has_teeth_against_a_naive_checker() -> None:
    """exec plus == in one process accepts the liars, and those who read the expected value from its
    frames.
    """

    def naive(code: str, expected: int) -> bool:
        namespace: dict[str, object] = {}
        exec(code, namespace)
        try:
            return bool(namespace["f"](3) == expected)  # type: ignore[operator]
        except ValueError:
            return False

    tried = [
        case
        for case in CASES
        if case.family in ("lying", "reading")
        and "patched" not in case.name
        and "/proc" not in case.code
    ]
    fooled = [
        case.name
        for case in tried
        if case.family == "lying" or "frames" in case.name
        if naive(case.code, 9)
    ]

    assert len(fooled) >= len(tried) // 3
    assert "frames and gc" in fooled


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_verdict_is_right_as_another_user_too(level: int) -> None:
    if not can_become_other():
        pytest.skip(
            "needs root, setpriv, a system Python 3.11 and an environment that other users can read"
        )
    script = Path(__file__).with_name("corpus_table.py").resolve()
    with other_user() as command:
        done = subprocess.run(
            [*command, str(script), str(level)],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    if "this machine has no level" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [result for result in results if not result[3]] == []
    assert len(results) >= len(CASES)
