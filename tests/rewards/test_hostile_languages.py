"""Native programs and hostile sources against the profiles of the jail."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from language_support import Languages
from tables import table

from async_rl.core.types import Verdict

ATTEMPTS = table(__file__, "attempts")
WORKS = {"scratch 1", "listed mine", "descriptors 0"}


def test_native_program_reaches_nothing(languages: Languages, tmp_path: Path) -> None:
    """Twice: the second run finds nothing that the first one left."""
    secret = tmp_path / "secret"
    secret.write_text("the key")
    code = ATTEMPTS.replace("SECRET", str(secret)).replace("FOLDER", str(tmp_path))
    for _ in range(2):
        lines = languages.output("c", code, timeout_s=5).splitlines()
        assert len(lines) >= 60
        worked = {line for line in lines if not line.split()[-1].startswith("E")}
        assert worked == WORKS
        # Refused by the kernel after the first one, not by the absence of a file.
        assert "execveat:empty EPERM" in lines
        assert "execveat:absolute EPERM" in lines


@pytest.mark.parametrize(("name", "body"), table(__file__, "other_entries_into_the_kernel"))
def test_other_entries_into_the_kernel_end_the_program(
    languages: Languages, name: str, body: str
) -> None:
    code = f"#include <stdio.h>\n#include <unistd.h>\nint main(void) {{ {body} return 0; }}"
    (result,) = languages.results("c", code, timeout_s=2)
    assert result.verdict == "runtime_error", name
    assert "SIGSYS" in result.message


BOMBS = table(__file__, "bombs")


def test_bombs_end_at_a_limit_and_leave_nothing(languages: Languages) -> None:
    tests = [(what, "few") for what in ("threads", "anonymous", "files", "files", "truncate")]
    results = languages.results("c", BOMBS, *tests, timeout_s=1, memory_mb=256)
    assert [result.verdict for result in results] == [
        Verdict.PASS, Verdict.PASS, Verdict.PASS, Verdict.PASS, Verdict.TIMEOUT,
    ]  # fmt: skip


COMPILE_BOMBS = table(__file__, "compile_bombs")


@pytest.mark.parametrize("name", COMPILE_BOMBS)
def test_hostile_source_ends_as_a_compile_error(languages: Languages, name: str) -> None:
    limits = languages.limit_compiler("cpp", cpu_s=3.0, memory_mb=256)
    with limits:
        started = time.monotonic()
        (result,) = languages.results("cpp", COMPILE_BOMBS[name])
    assert result.verdict == "compile_error"
    assert len(result.message) <= 2000
    assert result.message.isprintable() or "\n" in result.message
    assert time.monotonic() - started < 120


@pytest.mark.parametrize(("language", "code"), table(__file__, "files_of_the_host_do"))
def test_files_of_the_host_do_not_reach_the_compilers_text(
    languages: Languages, tmp_path: Path, language: str, code: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not_for_you = 1;")
    for path in (str(secret), "/etc/passwd", "/proc/self/environ", "/root/.bashrc"):
        (result,) = languages.results(language, code.format(path=path), timeout_s=2)
        assert result.verdict == "compile_error", result
        for text in ("not_for_you", "root:", "TOKEN"):
            assert text not in result.message


def test_compiler_that_writes_a_gigabyte_of_errors_is_cut_off(languages: Languages) -> None:
    lines = "\n".join(f'#pragma message "{"x" * 900}"' for _ in range(900))
    code = f'#pragma GCC diagnostic warning "-W#pragma-messages"\n{lines}\nint main() {{ y; }}'
    (result,) = languages.results("cpp", code)
    assert result.verdict == "compile_error"
    assert len(result.message) <= 2000


SHELL_ATTACKS = table(__file__, "shell_attacks")


@pytest.mark.parametrize("name", SHELL_ATTACKS)
def test_script_stays_in_its_cell(languages: Languages, name: str) -> None:
    """Each attack fails its test, harms no later program and leaves no process."""
    languages.need("shell")
    languages.results("shell", "echo ok", ("", "ok"))
    # Other tests of this process may own a process of such a name: the corpus keeps a victim.
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    replaced = languages.judge.num_replaced
    (result,) = languages.results("shell", SHELL_ATTACKS[name], ("", "ok"), timeout_s=0.5)
    assert result.verdict.is_score
    assert result.verdict != "pass"
    (after,) = languages.results("shell", "echo ok; ls", ("", "ok\nsolution.sh"))
    assert after.verdict == "pass", after
    assert languages.judge.num_replaced == replaced
    cells = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    assert not [each for each in cells if each.name() in ("sleep", "bash", "head", "tail")]


def test_product_is_a_regular_file_or_nothing(languages: Languages) -> None:
    """A compiler that an attacker controls leaves a link, a pipe, or a directory as its program."""
    for trick in ("ln -s /usr/bin/true solution", "mkfifo solution", "mkdir solution", "true"):
        assert languages.product_of(f"{trick}; true") == b""
    assert languages.product_of("printf content > solution") == b"content"


def test_source_that_does_not_fit_is_a_verdict(languages: Languages) -> None:
    for language in ("shell", "c"):
        (result,) = languages.results(language, "# " + "x" * (2 << 20))
        assert result.verdict == "compile_error"
        assert "more than 1048576" in result.message


def test_an_endless_program_uses_the_time_of_two_tests(languages: Languages) -> None:
    code = '#include <stdio.h>\nint main(void) {\n  int n; scanf("%d", &n);\n'
    code += '  volatile int k = n; while (k > 0);\n  printf("0");\n}'
    tests = [("0", "0"), ("1", "0"), ("0", "0"), ("1", "0"), ("0", "0"), ("1", "0")]
    results = languages.results("c", code, *tests, timeout_s=0.5)
    found = [str(result.verdict) for result in results]
    assert found == ["pass", "timeout", "pass", "timeout", "timeout", "timeout"]
    assert [result.cpu_s > 0.4 for result in results[3:]] == [True, False, False]


SIGNALS = {
    "c": '#include <signal.h>\n#include <stdio.h>\nint main() {{ raise({0}); puts("9"); }}',
    "shell": "kill -{0} $$\necho 9",
}


@pytest.mark.parametrize("language", SIGNALS)
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP", "SIGTERM", "SIGXFSZ"])
def test_no_signal_of_a_program_to_itself_leaves_it_unjudged(
    languages: Languages, language: str, signal: str
) -> None:
    code = SIGNALS[language].format(signal if language == "c" else signal.removeprefix("SIG"))
    (result,) = languages.results(language, code, ("", "9"), timeout_s=0.5)
    verdict = result.verdict
    assert verdict.is_score
    assert (verdict == "pass") is (signal == "SIGKILL")
    assert (verdict == "timeout") is (signal == "SIGSTOP")
