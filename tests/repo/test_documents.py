"""The files, commands, settings, make targets and metrics that documents name exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from documents import code_lines, spans
from repository import PRODUCT_FOLDERS, ROOT, files, name
from typer.core import TyperGroup

import async_rl
from async_rl.composition.schema import entry_of, settings
from async_rl.launchers.cli import application
from async_rl.observability.catalogue import METRICS, describe

DOCUMENTS = [
    path for path in files(".md") if name(path) == "README.md" or name(path).startswith("docs/")
]
OTHERS = ("tests", "docs", "benchmarks", "requirements", "containers", ".ci")
FOLDERS = tuple(f"{folder}/" for folder in (*PRODUCT_FOLDERS, *OTHERS))
COMMANDS = typer.main.get_command(application()).commands  # type: ignore[attr-defined]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
SETTINGS = settings()
SECTIONS = {setting.split(".")[0] for setting in SETTINGS if "." in setting}
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
GROUPS = {metric.split("/")[0] for metric in METRICS}


def commands(path: Path, program: str) -> Iterator[list[str]]:
    """Every use of a program, as words."""
    for text in (*spans(path), *code_lines(path)):
        if re.match(rf"(nice )?{program}( |$)", text) and "..." not in text:
            yield shlex.split(text, comments=True)[1:]


documents = pytest.mark.parametrize("path", DOCUMENTS, ids=name)


@documents
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    assert [t for t in targets if "://" not in t and not (path.parent / t).exists()] == []


@documents
def test_paths_exist(path: Path) -> None:
    named = {
        match.group() for span in spans(path) for match in [re.match(r"[\w./-]+", span)] if match
    }
    paths = {n for n in named if n.startswith(FOLDERS)}
    assert sorted(p for p in paths if not (ROOT / p).exists()) == []


@documents
def test_make_targets_exist(path: Path) -> None:
    assert [
        words
        for words in commands(path, "make")
        if words and not {w for w in words if "=" not in w} <= TARGETS
    ] == []


@documents
def test_commands_of_async_rl_exist_with_their_options(path: Path) -> None:
    for words in commands(path, "async-rl"):
        if not words or words[0].startswith("-"):
            continue
        assert words[0] in COMMANDS, words
        command = COMMANDS[words[0]]
        parts = [command, *(command.commands.values() if isinstance(command, TyperGroup) else ())]
        known = {o for part in parts for parameter in part.params for o in parameter.opts}
        known |= {"--help"}
        assert {w for w in words if w.startswith("--")} <= known, words


@documents
def test_settings_in_running_text_are_settings(path: Path) -> None:
    named = {
        match.group()
        for span in spans(path)
        for match in [re.match(r"[a-z_]+(\.[a-z_]+)+(?=$|[= ])", span)]
        if match
    }
    of_sections = [name for name in sorted(named) if name.split(".")[0] in SECTIONS]
    assert [n for n in of_sections if n not in SETTINGS and n not in entry_of(n)] == []


@documents
def test_metrics_are_declared(path: Path) -> None:
    named = {
        s
        for s in spans(path)
        if re.fullmatch(r"[a-z_]+/[a-z0-9_<>/-]+", s) and s.split("/")[0] in GROUPS
    }
    assert sorted(n for n in named if n not in METRICS and describe(n) is None) == []


def test_the_navigation_of_the_site_has_every_document() -> None:
    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict | list):
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(part)

    in_navigation = list(pages(SITE["nav"]))
    assert len(in_navigation) == len(set(in_navigation))
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in DOCUMENTS[1:]}
    others = {page for page in documents if page.startswith("decisions/")}
    assert set(in_navigation) == documents - others | {"decisions/README.md"}


def test_the_site_loads_nothing_from_other_hosts() -> None:
    # The plug-in adds its own copy of iframe-worker, on another host, unless one is configured.
    (shim,) = SITE["extra"]["polyfills"]
    assert "iframe-worker" in shim
    assert (ROOT / "docs" / shim).exists()
    assert SITE["theme"]["font"] is False


def test_every_public_name_is_on_the_page_of_the_interface() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    entries = re.findall(r"^::: async_rl\.(\w+)$", text, flags=re.MULTILINE)
    assert set(async_rl.__all__) - {"__version__"} - set(entries) == set()


def test_the_index_lists_every_document() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [
        path.relative_to(ROOT / "docs").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if "decisions" not in path.parts
    ]
    assert [page for page in pages if page != "README.md" and f"]({page})" not in index] == []
