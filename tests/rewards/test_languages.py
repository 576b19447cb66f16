from __future__ import annotations

import asyncio

import pytest
from language_support import Languages
from tables import table

from async_rl.core.packaged import read_packaged
from async_rl.core.types import Verdict
from async_rl.rewards.verifier.commands import CommandJudge
from async_rl.rewards.verifier.languages import LanguageRow, Unsupported, source_names
from async_rl.sandbox.cell import Outcome, Work
from async_rl.sandbox.cells import Cells

SQUARES = table(__file__, "squares")
BROKEN = table(__file__, "broken")


def test_every_language_of_the_table_has_a_program_here() -> None:
    rows = read_packaged("async_rl.rewards.verifier", "languages.toml", dict[str, LanguageRow])
    assert set(SQUARES) == set(rows)
    assert set(BROKEN) == {name for name, row in rows.items() if row.compile is not None}


@pytest.mark.parametrize("language", SQUARES)
def test_output_is_compared_for_each_test(languages: Languages, language: str) -> None:
    results = languages.results(
        language, SQUARES[language], ("12\n", "144\n"), ("13\n", "168"), ("14\n", "196")
    )
    assert [result.verdict for result in results] == ["pass", "wrong_answer", "pass"]
    assert "169" in results[1].message


@pytest.mark.parametrize("language", BROKEN)
def test_compile_error_is_a_verdict_with_the_compilers_text(
    languages: Languages, language: str
) -> None:
    code, name = BROKEN[language]
    results = languages.results(language, code, ("1", "1"), ("2", "4"))
    assert [result.verdict for result in results] == ["compile_error"] * 2
    assert name in results[0].message
    assert "/work" not in results[0].message


FAILS = table(__file__, "fails")


def test_limits_and_failures_have_their_verdicts(languages: Languages) -> None:
    """One program that fails in the way that its input names."""
    expected = {
        "loop": Verdict.TIMEOUT, "sleep": Verdict.TIMEOUT, "drip": Verdict.TIMEOUT,
        "abort": Verdict.RUNTIME_ERROR, "status": Verdict.RUNTIME_ERROR,
        "crash": Verdict.RUNTIME_ERROR, "memory": Verdict.MEMORY, "huge": Verdict.MEMORY,
        "output": Verdict.OUTPUT_LIMIT, "errors": Verdict.PASS, "deep": Verdict.PASS,
        "threads": Verdict.PASS,
    }  # fmt: skip
    tests = [(what, "done\n") for what in (*expected, *["threads"] * 20)]
    # Two timeouts end the tests of a program.
    endless = [
        languages.results("cpp", FAILS, test, timeout_s=0.5, memory_mb=128)[0] for test in tests[:3]
    ]
    others = languages.results("cpp", FAILS, *tests[3:], timeout_s=0.5, memory_mb=128)
    results = [*endless, *others]
    results, again = results[: len(expected)], results[len(expected) :]
    assert {result.verdict for result in again} == {Verdict.PASS}
    assert dict(zip(expected, [result.verdict for result in results], strict=True)) == expected
    messages = dict(zip(expected, [result.message for result in results], strict=True))
    assert "SIGABRT" in messages["abort"]
    assert "so it is" in messages["abort"]
    assert messages["status"] == "exited with status 3"
    assert "SIGSEGV" in messages["crash"]


@pytest.mark.parametrize("language", ["java", "javascript", "rust", "go"])
def test_memory_of_a_runtime_is_bounded(languages: Languages, language: str) -> None:
    code = {
        "java": "import java.util.*; public class Main { public static void main(String[] a) {"
        " List<long[]> all = new ArrayList<>(); for (;;) all.add(new long[1 << 16]); } }",
        "javascript": "const all = []; for (;;) all.push(Buffer.alloc(1 << 20, 1));",
        "rust": "fn main() { let mut all = vec![]; loop { all.push(vec![1u8; 1 << 20]); } }",
        "go": "package main\nfunc main() { all := [][]byte{}; for { b := make([]byte, 1 << 20)\n"
        "for i := range b { b[i] = 1 }; all = append(all, b); println(len(all)) } }",
    }[language]
    (result,) = languages.results(language, code, timeout_s=10, memory_mb=64)
    assert result.verdict == "memory", result
    assert result.memory_mb < 600


def test_equal_sources_are_compiled_once_and_a_large_product_is_not_kept(
    languages: Languages, monkeypatch: pytest.MonkeyPatch
) -> None:
    languages.need("c")
    compiler = languages.runner.run(languages.judge.require("c"))
    run, compiled = Cells.run, []

    async def counted(cells: Cells, work: Work) -> Outcome:
        compiled.append(work.spec)
        return await run(cells, work)

    monkeypatch.setattr(Cells, "run", counted)

    def num_compilations(*programs: tuple[str, dict[str, str]]) -> int:
        async def compile_all() -> None:
            for code, headers in programs:
                await asyncio.gather(*(compiler.program(code, headers) for _ in range(3)))

        compiled.clear()
        languages.runner.run(compile_all())
        return len(compiled)

    code = '#include <stdio.h>\nint main(void) { puts("kept"); }'
    large = "char many[5 << 20] = {1};\n" + code
    assert num_compilations((code, {}), (code, {}), (code, {"a.h": "int a;"})) == 2
    assert num_compilations((code, {"a.h": "int b;"})) == 1
    assert num_compilations(("int main(void) { return x; }", {})) == 1
    assert num_compilations((large, {}), (large, {})) == 2


def test_missing_compiler_is_refused_by_name(
    languages: Languages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    judge = CommandJudge(1, languages.level, [], {})
    with pytest.raises(Unsupported, match=r"programs in go need go, which is not on the PATH"):
        languages.runner.run(judge.require("go"))


def test_weaker_jail_refuses_every_language_with_the_reason(languages: Languages) -> None:
    judge = CommandJudge(1, 2, ["level 1: unshare failed"], {})
    with pytest.raises(Unsupported, match=r"level 1 \(namespaces\).*unshare failed"):
        languages.runner.run(judge.require("cpp"))


def test_main_class_of_a_java_program() -> None:
    code = "class A {}\npublic final class B { public static void main(String[] a) {} }"
    assert source_names(code) == {"file": "B.java", "main": "B"}
    assert source_names("package a.b;\npublic class B {\n void main() {} }")["main"] == "a.b.B"
    assert source_names("class X { static void main(String[] a) {} }")["main"] == "X"
    assert source_names("\n" * 200_000)["file"] == "Main.java"
