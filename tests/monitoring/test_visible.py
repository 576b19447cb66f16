"""Text of models and data cannot control the terminal that shows it."""

import io
import logging
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from async_rl.launchers.commands import live
from async_rl.monitoring.terminal import Terminal
from async_rl.observability.logs import configure_logging, log_path

CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
TITLE = "\x9d0;title\x9c\x7f\r"


def test_a_terminal_shows_them_in_every_form() -> None:
    text = Text(f"{CLIPBOARD}{TITLE}", style="red")
    table = Table("response")
    table.add_row(text)
    for form in (table, text, f"{CLIPBOARD}{TITLE}"):
        out = io.StringIO()
        terminal = Terminal(file=out, force_terminal=True, color_system="standard", width=120)
        terminal.print(form, markup=False, highlight=False)
        shown = out.getvalue()
        assert "␛]52;c;" in shown
        assert not {"\x07", "\x7f", "\x9d", "\r"} & set(shown)
        assert "\x1b]" not in shown
        # rich's own colours are kept
        assert isinstance(form, str) or "\x1b[31m" in shown


def test_logs_show_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = configure_logging(tmp_path, "verifier-0")
    log.warning("the model wrote %s", CLIPBOARD)
    logging.getLogger().handlers[0].flush()
    assert "wrote ␛]52;c;ZXZpbA==␇" in log_path(tmp_path, "verifier-0").read_text()
    (tmp_path / "config.yaml").touch()
    (tmp_path / "logs" / "verifier-0.out").write_text(f"output of a library {CLIPBOARD}\n")
    live.logs(str(tmp_path), output=True)
    assert capsys.readouterr().out == "output of a library ␛]52;c;ZXZpbA==␇\n"
