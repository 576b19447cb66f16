import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.launchers.commands import live
from async_rl.observability.logs import configure_logging, log_path


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    logging.captureWarnings(False)  # which another test may have left on
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)


def test_lines_name_level_process_and_source_and_a_second_life_appends(tmp_path: Path) -> None:
    log = configure_logging(tmp_path, "generator-0")
    log.info("engine ready after %.1f s", 14.2)
    logging.getLogger("vllm.engine").warning("slow")
    logging.getLogger("httpx").info("GET")  # chatty libraries: from warnings on
    logging.getLogger("httpx").warning("refused")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old function", FutureWarning, stacklevel=1)
    log = configure_logging(tmp_path, "generator-0")
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        log.error("fatal", exc_info=error)
    text = log_path(tmp_path, "generator-0").read_text()
    lines = [
        re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ", "", line) for line in text.splitlines()
    ]
    assert lines[:3] == [
        "INFO    generator-0  engine ready after 14.2 s",
        "WARNING generator-0  [vllm.engine] slow",
        "WARNING generator-0  [httpx] refused",
    ]
    assert "FutureWarning: old function" in lines[3]
    at = lines.index("ERROR   generator-0  fatal")
    assert lines[-1] == "    ValueError: no such thing"
    assert all(line.startswith("    ") for line in lines[at + 1 :])


def test_control_characters_of_a_model_or_a_library_are_shown_and_not_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clipboard = "\x1b]52;c;ZXZpbA==\x07"
    configure_logging(tmp_path, "verifier-0").warning("the model wrote %s", clipboard)
    assert "wrote ␛]52;c;ZXZpbA==␇" in log_path(tmp_path, "verifier-0").read_text()
    (tmp_path / "config.yaml").touch()
    (tmp_path / "logs" / "verifier-0.out").write_text(f"output of a library {clipboard}\n")
    live.logs(str(tmp_path), output=True)
    assert capsys.readouterr().out == "output of a library ␛]52;c;ZXZpbA==␇\n"
