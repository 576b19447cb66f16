"""Contents that no file may have."""

import ast
import functools
import re
from collections import Counter

from repository import files, name, product, syntax

# Written in halves, so that this file does not hold what it forbids.
REGISTRY_HOSTS = re.compile(
    "|".join(
        re.escape(a + b)
        for a, b in [
            ("pypi.", "org"),
            ("files.python", "hosted.org"),
            ("download.py", "torch.org"),
            ("npmjs", ".org"),
            ("npmjs", ".com"),
        ]
    )
    + "|"
    + re.escape("deb.")
    + re.escape("debian.org")
)
BOUNDARIES = {
    "async_rl/runtime/main.py",
    "async_rl/rollouts/groups.py",
    "async_rl/supervision/preparation.py",
}
EVERYTHING = {"Exception", "BaseException"}
MAX_CAUGHT = 3
_PARSE = "ast.parse and ast.literal_eval document these four for text that a model wrote"
_USER = "runs code of the user, whose errors become an error of configuration or of the sample"
_YAML = "reads a YAML file: errors of the file, its encoding and its form"
FOREIGN_CODE: dict[str, tuple[int, str]] = {
    "async_rl/adapters/reasoning_gym.py": (1, "its generators read what a model wrote"),
    "async_rl/config/plugins.py": (1, _USER),
    "async_rl/core/assert_tests.py": (1, _PARSE),
    "async_rl/learner/loading.py": (1, "runs the code of a model on rows that it may not support"),
    "async_rl/rewards/responses.py": (2, _PARSE),
    "async_rl/rewards/text_process.py": (1, "math_verify evaluates what a model wrote"),
    "launchers/backends/ray_actors.py": (1, "ray.init raises these, and has no common base class"),
    "async_rl/composition/files.py": (1, _YAML),
    "launchers/migration/recorder.py": (1, "a person's script, in the jail"),
    "launchers/migration/sources.py": (2, _YAML),
}
"""Files where foreign code may fail in many ways: (number of broad handlers, reason)."""


DESTROY = "destroy_process" + "_group("
GROUPS_OF_ONE = {
    "benchmarks/learner/learner.py",
    "benchmarks/learner/memory_plan.py",
    "tests/learner/conftest.py",
    "tests/planning/test_memory_account.py",
}
"""Files that destroy a process group: it has no other rank, or is torch's fake."""
JOINS = re.compile(r'sharding\.join\(|build_trainer\(|init_process_group\(\s*"(?!fake)')


def test_a_process_keeps_its_group_of_several_ranks_and_ends_by_leave() -> None:
    """Threads of gloo work on while a group is destroyed or an interpreter ends, and crash."""
    found = {name(path): path.read_text() for path in files(".py")}
    assert {file for file, text in found.items() if DESTROY in text} == GROUPS_OF_ONE
    for file, text in found.items():
        if JOINS.search(text) and "__main__" in text:
            assert "    leave(main())\n" in text, file
        if JOINS.search(text) and "Process(" in text:
            assert "warm_context()" in text, file
    assert "    leave(main())\n" in found["async_rl/runtime/main.py"]


def test_no_file_names_a_package_registry() -> None:
    wrong = []
    for path in files():
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        wrong += [f"{name(path)} names {match.group()}" for match in REGISTRY_HOSTS.finditer(text)]
    assert wrong == []


def test_every_exception_is_caught_at_the_boundaries_only() -> None:
    """Also as a tuple of many classes, which amounts to the same; cleanup may raise again."""
    broad: Counter[str] = Counter()
    for path in product():
        if not name(path).startswith("sandbox/") and name(path) not in BOUNDARIES:
            broad.update({name(path): len(broad_handlers(syntax(path)))})
    assert +broad == {file: count for file, (count, _) in FOREIGN_CODE.items()}


def broad_handlers(tree: ast.Module) -> list[str]:
    """Handlers and `suppress` calls of everything, or of more than MAX_CAUGHT classes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if not raises_again:
                found.append([node.type] if node.type else [ast.Name("BaseException")])
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            found.append(list(node.args))
    caught = [{name for kind in kinds for name in class_names(kind)} for kinds in found]
    return [str(names) for names in caught if names & EVERYTHING or len(names) > MAX_CAUGHT]


def class_names(kind: ast.expr) -> set[str]:
    """Names of the classes of an `except` clause; a constant of classes counts as its members."""
    text = ast.unparse(kind)
    if isinstance(kind, ast.Tuple | ast.BinOp | ast.Starred):
        parts = [child for child in ast.iter_child_nodes(kind) if isinstance(child, ast.expr)]
        return {name for part in parts for name in class_names(part)}
    if text.rpartition(".")[2].isupper():
        return class_constants().get(text.rpartition(".")[2], {text})
    return {text}


@functools.cache
def class_constants() -> dict[str, set[str]]:
    """Members of the constants in capitals that are tuples of names, over the whole product."""
    found = {}
    for path in product():
        for node in syntax(path).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                target = ast.unparse(node.targets[0])
                if target.isupper():
                    found[target] = {ast.unparse(member) for member in node.value.elts}
    return found


def test_many_classes_are_broad_however_they_are_written() -> None:
    four = "(A, B, C, D)"
    for text in (
        f"try: f()\nexcept {four}: pass",
        "try: f()\nexcept (OSError, Exception): pass",
        "try: f()\nexcept: pass",
        "with contextlib.suppress(A, B, C, D): f()",
    ):
        assert len(broad_handlers(ast.parse(text))) == 1, text
    for text in ("try: f()\nexcept (A, B, C): pass", f"try: f()\nexcept {four}:\n  g()\n  raise"):
        assert broad_handlers(ast.parse(text)) == [], text
