"""Native programs and hostile sources against the profiles of the jail."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from language_support import Languages

from async_rl.core.types import Verdict

ATTEMPTS = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
static char* none[] = {0};
static void say(const char* name, long got) {
    printf("%s %s\n", name, got < 0 ? strerrorname_np(errno) : "WORKED");
}
static void reads(const char* path) {
    char name[200];
    snprintf(name, sizeof name, "read:%s", path);
    say(name, open(path, O_RDONLY));
}
int main(void) {
    struct rlimit more = {1L << 40, 1L << 40};
    int descriptors = 0;
    for (int i = 3; i < 1024; i++) descriptors += fcntl(i, F_GETFD) >= 0;
    printf("descriptors %d\n", descriptors);
    say("fork", syscall(SYS_fork));
    say("vfork", syscall(SYS_vfork));
    say("clone", syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
    say("clone:namespace", syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
    say("clone3", syscall(SYS_clone3, 0, 0));
    say("execve", execve("/usr/bin/true", none, none));
    int self = open("/usr/bin/true", O_PATH);
    say("execveat:path", syscall(SYS_execveat, AT_FDCWD, "/usr/bin/true", none, none, 0));
    say("execveat:empty", syscall(SYS_execveat, self, "", none, none, AT_EMPTY_PATH));
    say("execveat:absolute", syscall(SYS_execveat, 0, "/usr/bin/true", none, none, AT_EMPTY_PATH));
    say("execveat:stdin", syscall(SYS_execveat, 0, "", none, none, AT_EMPTY_PATH));
    say("socket:inet", socket(AF_INET, SOCK_STREAM, 0));
    say("socket:unix", socket(AF_UNIX, SOCK_STREAM, 0));
    say("socket:netlink", socket(AF_NETLINK, SOCK_RAW, 0));
    say("ptrace", ptrace(PTRACE_TRACEME, 0, 0, 0));
    say("ptrace:zygote", ptrace(PTRACE_ATTACH, 1, 0, 0));
    say("process_vm_readv", syscall(SYS_process_vm_readv, 1, 0, 0, 0, 0, 0));
    say("io_uring", syscall(SYS_io_uring_setup, 8, 0));
    say("bpf", syscall(SYS_bpf, 0, 0, 0));
    say("perf", syscall(SYS_perf_event_open, 0, 0, 0, 0, 0));
    say("userfaultfd", syscall(SYS_userfaultfd, 0));
    say("memfd", syscall(SYS_memfd_create, "x", 0));
    say("pidfd", syscall(SYS_pidfd_open, 1, 0));
    say("pidfd_getfd", syscall(SYS_pidfd_getfd, 0, 0, 0));
    say("mount", syscall(SYS_mount, "x", "/tmp", "tmpfs", 0, 0));
    say("unshare", unshare(CLONE_NEWUSER));
    say("setns", setns(0, 0));
    say("chroot", chroot("/tmp"));
    say("mknod", syscall(SYS_mknod, "/tmp/null", 0020666, 0x103));
    say("symlink", symlink("/etc/passwd", "/tmp/link"));
    say("kill:zygote", kill(1, SIGINT));
    say("kill:parent", kill(getppid(), SIGKILL));
    say("kill:all", kill(-1, SIGKILL));
    say("tgkill:zygote", syscall(SYS_tgkill, 1, 1, SIGINT));
    say("sigqueue", syscall(SYS_rt_sigqueueinfo, 1, SIGINT, 0));
    say("setrlimit", setrlimit(RLIMIT_AS, &more));
    say("prlimit:zygote", syscall(SYS_prlimit64, 1, RLIMIT_CPU, 0, &more));
    say("seccomp", syscall(SYS_seccomp, 1, 0, 0));
    say("keyctl", syscall(SYS_keyctl, 0, 0, 0, 0, 0));
    say("personality", syscall(SYS_personality, 0x0040000));
    say("setuid", setuid(1));
    say("shm", syscall(SYS_shmget, 0, 1 << 20, 0600));
    int both = PROT_READ | PROT_WRITE;
    say("shared", (long)mmap(0, 1 << 20, both, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    reads("/etc/passwd"); reads("/proc/self/environ"); reads("/proc/1/maps"); reads("/sys");
    reads("/"); reads("/usr/bin/true"); reads("/usr/lib"); reads("/dev/zero"); reads("/dev/mem");
    reads("/root"); reads("SECRET"); reads("FOLDER");
    say("write:folder", open("FOLDER/new", O_CREAT | O_WRONLY, 0600));
    say("write:dev", open("/dev/new", O_CREAT | O_WRONLY, 0600));
    say("write:usr", open("/usr/new", O_CREAT | O_WRONLY, 0600));
    int fd = open("/tmp/mine", O_CREAT | O_RDWR, 0700);
    printf("scratch %d\n", fd >= 0);
    printf("listed");
    DIR* here = opendir("/tmp");
    for (struct dirent* each; here && (each = readdir(here));)
        if (each->d_name[0] != '.') printf(" %s", each->d_name);
    puts("");
}
"""
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


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("int 0x80", 'long r; asm volatile("int $0x80" : "=a"(r) : "a"(20)); printf("%ld", r);'),
        ("x32", 'printf("%ld", syscall(0x40000000 + 39));'),
    ],
)
def test_other_entries_into_the_kernel_end_the_program(
    languages: Languages, name: str, body: str
) -> None:
    code = f"#include <stdio.h>\n#include <unistd.h>\nint main(void) {{ {body} return 0; }}"
    (result,) = languages.results("c", code, timeout_s=2)
    assert result.verdict == "runtime_error", name
    assert "SIGSYS" in result.message


BOMBS = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <fcntl.h>
static void* wait_forever(void* unused) { for (;;) pause(); }
int main(void) {
    char what[20];
    if (scanf("%19s", what) != 1) return 1;
    if (!strcmp(what, "threads")) {
        pthread_t thread;
        int count = 0;
        while (count < 10000 && !pthread_create(&thread, 0, wait_forever, 0)) count++;
        printf("%s\n", count < 70 ? "few" : "many");
        fflush(stdout);
        _exit(0);
    }
    if (!strcmp(what, "anonymous"))
        for (long size = 0;; size += 1 << 20) {
            char* p = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (p == MAP_FAILED) return puts(size < 400 << 20 ? "few" : "many"), 0;
            memset(p, 1, 1 << 20);
        }
    if (!strcmp(what, "files")) {
        char name[40], block[4096] = {1};
        long size = 0;
        int count = 0;
        for (;; count++) {
            snprintf(name, sizeof name, "/tmp/f%d", count);
            int fd = open(name, O_CREAT | O_WRONLY, 0600);
            if (fd < 0) break;
            for (int i = 0; i < 8 && write(fd, block, 4096) == 4096; i++) size += 4096;
            close(fd);
        }
        printf("%s\n", count < 300 && size <= 16 << 20 ? "few" : "many");
    }
    if (!strcmp(what, "truncate")) {
        for (;;) {
            if (write(1, what, 8) < 0) break;
            ftruncate(1, 0);
            lseek(1, 0, SEEK_SET);
        }
    }
}
"""


def test_bombs_end_at_a_limit_and_leave_nothing(languages: Languages) -> None:
    tests = [(what, "few") for what in ("threads", "anonymous", "files", "files", "truncate")]
    results = languages.results("c", BOMBS, *tests, timeout_s=1, memory_mb=256)
    assert [result.verdict for result in results] == [
        Verdict.PASS, Verdict.PASS, Verdict.PASS, Verdict.PASS, Verdict.TIMEOUT,
    ]  # fmt: skip


COMPILE_BOMBS = {
    "templates": "template<int N> struct A { A<N + 1> a; A<N + 2> b; };\nint main() { A<0> a; }",
    "constexpr": "constexpr long f(long n) { long s = 0; for (long i = 0; i < n; i++) s += i;"
    " return s; }\nconstexpr long x = f(1L << 60);\nint main() { return x; }",
    "macros": "#define A x x x x x x x x\n"
    + "".join(f"#define {chr(66 + i)} {' '.join([chr(65 + i)] * 8)}\n" for i in range(12))
    + "int main() { M }",
    "zero": "#include </dev/zero>\nint main() {}",
    "random": '#include "/dev/urandom"\nint main() {}',
    "itself": '#include __FILE__\n#include "solution.cpp"\nint main() {}',
    "array": "char a[1L << 30] = {1};\nint main() { return a[5]; }",
    "incbin": 'asm(".incbin \\"/dev/zero\\"");\nint main() {}',
    "repeat": 'asm(".rept 1000000000\\n.quad 1\\n.endr");\nint main() {}',
}


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


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("c", '#include "{path}"\nint main(void) {{}}'),
        ("c", 'asm(".incbin \\"{path}\\"");\nint main(void) {{ return 0; }}'),
        ("c", '#include "../../../../../..{path}"\nint main(void) {{}}'),
        ("rust", 'fn main() {{ print!("{{}}", include_str!("{path}")); }}'),
        ("rust", 'fn main() {{ print!("{{}}", env!("{path}")); }}'),
        ("go", 'package main\nimport _ "embed"\n//go:embed {path}\nvar s string\n'
         "func main() {{ print(s) }}"),
    ],
)  # fmt: skip
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


SHELL_ATTACKS = {
    "fork bomb": ":(){ :|:& };:",
    "daemon": "setsid sleep 1000 & disown; echo x",
    "hidden cpu": "trap '' CHLD; while :; do (for i in 1 2 3 4 5 6 7 8 9; do :; done) & done",
    "memory": "for i in 1 2 3 4 5 6; do (head -c 100000000 /dev/zero | tail) & done; wait",
    "signal": "kill -INT 1; kill -TERM 1; kill -9 1; kill -9 -1",
    "network": "exec 3<>/dev/tcp/127.0.0.1/80 && echo ok",
    "mount": "mount -t tmpfs x /tmp && echo ok; unshare -Ur true && echo ok",
    "host": "cat /etc/passwd /proc/1/environ /root/.bashrc && echo ok; ls / && echo ok",
    "binary": "cp /usr/bin/true t; chmod +x t; ./t && echo ok;"
    " /lib64/ld-linux-x86-64.so.2 ./t && echo ok",
    "disk": "head -c 1000000000 /dev/zero > big && echo ok",
}  # fmt: skip


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
    deep = "for i in {1..1500}; do mkdir d; cd d; done; echo x > x"
    assert languages.product_of(f"mkdir out; cd out; {deep}", "out/") == b""
    assert languages.product_of("printf content > solution") == b"content"
    archive = languages.product_of(
        "mkdir -p out/d; printf 1 > out/d/a; ln -s /usr/bin/true out/b; ln -s / out/c; true", "out/"
    )
    assert b"d/a" in archive
    assert len(archive) < 300


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
