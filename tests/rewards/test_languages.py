"""Programs in other languages than Python: right verdicts, and nothing within reach."""

from pathlib import Path

import psutil
import pytest
from rewards_support import Jail
from tables import table

from async_rl.core.records import read_packaged
from async_rl.core.types import StdinTest
from async_rl.rewards.verifier.commands import CommandJudge
from async_rl.rewards.verifier.languages import LanguageRow, Unsupported
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.sandbox.cell import command
from async_rl.sandbox.protocol import CommandSpec, Profile

SQUARES, BROKEN, FAILS, FAILURES = (
    table(__file__, name) for name in ("squares", "broken", "fails", "failures")
)
GREEDY = ["java", "javascript", "rust", "go"]


def test_every_language_of_the_table_has_a_program_here() -> None:
    rows = read_packaged("async_rl.rewards.verifier", "languages.toml", dict[str, LanguageRow])
    assert set(SQUARES) == set(rows)
    assert set(BROKEN) == {name for name, row in rows.items() if row.compile is not None}


@pytest.mark.parametrize("language", SQUARES)
def test_output_is_compared_for_each_test(jail: Jail, language: str) -> None:
    tests = [("12\n", "144\n"), ("13\n", "168"), ("14\n", "196")]
    results = jail.results(SQUARES[language], tests, language)
    assert [result.verdict for result in results] == ["pass", "wrong_answer", "pass"]
    assert "169" in results[1].message


@pytest.mark.parametrize("language", BROKEN)
def test_compile_error_is_a_verdict_with_the_compilers_text(jail: Jail, language: str) -> None:
    code, name = BROKEN[language]
    results = jail.results(code, [("1", "1"), ("2", "4")], language)
    assert [result.verdict for result in results] == ["compile_error"] * 2
    assert name in results[0].message
    assert "/work" not in results[0].message


def test_limits_and_failures_have_their_verdicts(jail: Jail) -> None:
    """One program that fails in the way that its input names."""
    # Two timeouts end the tests of a program.
    endless = [jail.result(FAILS, (what, "done\n"), "cpp") for what in ("loop", "sleep", "drip")]
    tests = [(what, "done\n") for what in (*FAILURES, *["threads"] * 5)][3:]
    results = [*endless, *jail.results(FAILS, tests, "cpp")]
    assert [result.verdict for result in results[len(FAILURES) :]] == ["pass"] * 5
    found = dict(zip(FAILURES, results, strict=False))
    for what, (verdict, says) in FAILURES.items():
        assert found[what].verdict == verdict, (what, found[what])
        assert says in found[what].message
    assert "so it is" in found["abort"].message


@pytest.mark.parametrize("language", GREEDY)
def test_memory_of_a_runtime_is_bounded(jail: Jail, language: str) -> None:
    result = jail.result(SQUARES[language], ("-1", ""), language, timeout_s=10, memory_mb=64)
    assert result.verdict == "memory", result
    assert result.memory_mb < 600


def test_missing_compiler_and_weaker_jail_are_refused_by_name(
    jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    judge = CommandJudge(1, jail.cells.level, [], {})
    with pytest.raises(Unsupported, match=r"programs in go need go, which is not on the PATH"):
        jail.run(judge.require("go"))
    weak = CommandJudge(1, 2, ["level 1: unshare failed"], {})
    with pytest.raises(Unsupported, match=r"level 1 \(namespaces\).*unshare failed"):
        jail.run(weak.require("cpp"))


ATTEMPTS, BOMBS, COMPILE_BOMBS, SHELL_ATTACKS, SIGNALS = (
    table(__file__, name)
    for name in ("attempts", "bombs", "compile_bombs", "shell_attacks", "signals")
)
WORKS = {"scratch 1", "listed mine", "descriptors 0"}


def test_native_program_reaches_nothing(jail: Jail, tmp_path: Path) -> None:
    """Twice: the second run finds nothing that the first one left."""
    jail.need("c")
    secret = tmp_path / "secret"
    secret.write_text("the key")
    code = ATTEMPTS.replace("SECRET", str(secret)).replace("FOLDER", str(tmp_path))
    test = StdinTest(input="", output="")
    request = VerifyRequest(code=code, language="c", tests=[test], timeout_s=5)
    for _ in range(2):
        result, output = jail.run(jail.judge.run(request))
        assert result.verdict == "pass", result
        lines = output.decode().splitlines()
        assert len(lines) >= 60
        worked = {line for line in lines if not line.split()[-1].startswith("E")}
        assert worked == WORKS
        # Refused by the kernel after the first one, not by the absence of a file.
        assert "execveat:empty EPERM" in lines
        assert "execveat:absolute EPERM" in lines


@pytest.mark.parametrize(("name", "body"), table(__file__, "other_entries_into_the_kernel"))
def test_other_entries_into_the_kernel_end_the_program(jail: Jail, name: str, body: str) -> None:
    code = f"#include <stdio.h>\n#include <unistd.h>\nint main(void) {{ {body} return 0; }}"
    result = jail.result(code, ("", ""), "c", timeout_s=2)
    assert result.verdict == "runtime_error", name
    assert "SIGSYS" in result.message


def test_bombs_end_at_a_limit_and_leave_nothing(jail: Jail) -> None:
    tests = [(what, "few") for what in ("threads", "anonymous", "files", "files", "truncate")]
    found = jail.verdicts(BOMBS, tests, language="c", timeout_s=1, memory_mb=256)
    assert found == [*["pass"] * 4, "timeout"]


@pytest.mark.parametrize("name", COMPILE_BOMBS)
def test_hostile_source_ends_as_a_compile_error(jail: Jail, name: str) -> None:
    with jail.limit_compiler("cpp", cpu_s=1.0, memory_mb=256):
        result = jail.result(COMPILE_BOMBS[name], ("", ""), "cpp")
    assert result.verdict == "compile_error"
    assert len(result.message) <= 2000
    assert result.message.isprintable() or "\n" in result.message


@pytest.mark.parametrize(("language", "code"), table(__file__, "files_of_the_host_do"))
def test_files_of_the_host_do_not_reach_the_compilers_text(
    jail: Jail, tmp_path: Path, language: str, code: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not_for_you = 1;")
    for path in (str(secret), "/etc/passwd", "/proc/self/environ"):
        result = jail.result(code.format(path=path), ("", ""), language, timeout_s=2)
        assert result.verdict == "compile_error", result
        for text in ("not_for_you", "root:", "TOKEN"):
            assert text not in result.message


@pytest.mark.parametrize("name", SHELL_ATTACKS)
def test_script_stays_in_its_cell(jail: Jail, name: str) -> None:
    """Each attack fails its test, harms no later program and leaves no process."""
    jail.results("echo ok", [("", "ok")], "shell")
    # Other tests of this process may own a process of such a name: the corpus keeps a victim.
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    replaced = jail.judge.num_replaced
    result = jail.result(SHELL_ATTACKS[name], ("", "ok"), "shell")
    assert result.verdict.is_score
    assert result.verdict != "pass"
    after = jail.result("echo ok; ls", ("", "ok\nsolution.sh"), "shell")
    assert after.verdict == "pass", after
    assert jail.judge.num_replaced == replaced
    cells = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    assert not [each for each in cells if each.name() in ("sleep", "bash", "head", "tail")]


def product_of(jail: Jail, script: str) -> bytes:
    """What a cell returns as the product of a script that runs as a compiler does."""
    spec = CommandSpec(
        profile=Profile.TOOLS, executable="/usr/bin/bash", arguments=["bash", "-c", script],
        environment=["PATH=/usr/bin"], files=[], product="solution", readable=["/usr"],
        runnable=["/usr"], cpu_s=2, memory_bytes=256 << 20, process_limits=[],
        file_bytes=1 << 20, scratch_bytes=16 << 20,
    )  # fmt: skip
    jail.need("c")
    compiler = jail.run(jail.judge.commands.require("c"))
    return jail.run(compiler.cells.run(command(spec, b"", [], 1000))).contents[2]


def test_product_is_a_regular_file_or_nothing(jail: Jail) -> None:
    """A compiler that an attacker controls leaves a link, a pipe, or a directory as its program."""
    for trick in ("ln -s /usr/bin/true solution", "mkfifo solution", "mkdir solution", "true"):
        assert product_of(jail, f"{trick}; true") == b""
    assert product_of(jail, "printf content > solution") == b"content"


@pytest.mark.parametrize("language", SIGNALS)
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP", "SIGTERM"])
def test_no_signal_of_a_program_to_itself_leaves_it_unjudged(
    jail: Jail, language: str, signal: str
) -> None:
    name = signal if language == "c" else signal.removeprefix("SIG")
    verdict = jail.result(SIGNALS[language].replace("<signal>", name), ("", "9"), language).verdict
    assert verdict.is_score
    assert (verdict == "pass") is (signal == "SIGKILL")
    assert (verdict == "timeout") is (signal == "SIGSTOP")
