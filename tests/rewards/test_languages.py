import pytest
from rewards_support import Jail
from tables import table

from async_rl.core.records import read_packaged
from async_rl.rewards.verifier.commands import CommandJudge
from async_rl.rewards.verifier.languages import LanguageRow, Unsupported, source_names

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


def test_main_class_of_a_java_program() -> None:
    code = "class A {}\npublic final class B { public static void main(String[] a) {} }"
    assert source_names(code) == {"file": "B.java", "main": "B"}
    assert source_names("package a.b;\npublic class B {\n void main() {} }")["main"] == "a.b.B"
    assert source_names("class X { static void main(String[] a) {} }")["main"] == "X"
