from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.observability.logs import configure_logging, log_path


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)


def lines(run_dir: Path) -> list[str]:
    """The process's log without its times."""
    text = log_path(run_dir, "generator-0").read_text()
    return [
        re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ", "", line) for line in text.splitlines()
    ]


def test_a_line_names_level_and_process_and_a_foreign_source(tmp_path: Path) -> None:
    log = configure_logging(tmp_path, "generator-0")
    log.info("engine ready after %.1f s", 14.2)
    logging.getLogger("vllm.engine").warning("slow")
    assert lines(tmp_path) == [
        "INFO    generator-0  engine ready after 14.2 s",
        "WARNING generator-0  [vllm.engine] slow",
    ]


def test_a_traceback_is_indented_under_its_line(tmp_path: Path) -> None:
    log = configure_logging(tmp_path, "generator-0")
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        log.error("fatal", exc_info=error)
    first, *rest = lines(tmp_path)
    assert first == "ERROR   generator-0  fatal"
    assert rest[-1] == "    ValueError: no such thing"
    assert all(line.startswith("    ") for line in rest)


def test_chatty_libraries_are_heard_from_warnings_on(tmp_path: Path) -> None:
    configure_logging(tmp_path, "generator-0")
    logging.getLogger("httpx").info("GET")
    logging.getLogger("httpx").warning("refused")
    assert lines(tmp_path) == ["WARNING generator-0  [httpx] refused"]


def test_warnings_of_the_warnings_module_arrive_too(tmp_path: Path) -> None:
    configure_logging(tmp_path, "generator-0")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old function", FutureWarning, stacklevel=1)
    assert "FutureWarning: old function" in lines(tmp_path)[0]


def test_a_second_life_of_a_process_appends(tmp_path: Path) -> None:
    configure_logging(tmp_path, "generator-0").info("first")
    configure_logging(tmp_path, "generator-0").info("second")
    assert [line.rpartition(" ")[2] for line in lines(tmp_path)] == ["first", "second"]
