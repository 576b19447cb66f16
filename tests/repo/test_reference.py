"""The pages of docs/ that are made from code are what the code makes."""

from repository import ROOT

from async_rl.composition.schema import settings
from async_rl.observability.catalogue import METRICS
from docs.generate.pages import metrics_page, pages
from docs.generate.settings import settings_page, short_span


def test_the_pages_are_what_the_code_says() -> None:
    texts = pages().items()
    old = [name for name, text in texts if (ROOT / "docs" / name).read_text() != text]
    assert old == [], "run make docs and commit what it writes"


def test_every_metric_stands_on_the_page_once_with_its_meaning() -> None:
    rows = [
        line
        for line in metrics_page().partition("\n## All metrics")[2].splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) == len(METRICS)
    for name, spec in METRICS.items():
        assert (
            sum(
                line.startswith(f"| `{name}` |") and spec.meaning in line.replace("\\|", "|")
                for line in rows
            )
            == 1
        ), name


def test_every_setting_stands_on_the_page_once_with_its_range_and_meaning() -> None:
    rows = [line for line in settings_page().splitlines() if line.startswith("| `")]
    for path, setting in settings().items():
        (row,) = [row for row in rows if row.startswith(f"| `{path}` |")]
        _, _, values, meaning, _ = (cell.strip() for cell in row.replace("\\|", "/").split("|"))
        assert values.endswith(short_span(setting).replace("|", "/"))
        assert meaning == setting.description.replace("|", "/")


def test_ranges_are_short() -> None:
    shown = {path: short_span(setting) for path, setting in settings().items()}
    assert shown["monitoring.prometheus_port"] == "int >= 0 and <= 65535 or null"
    assert shown["timeouts.call_s"] == "float > 0"
    assert shown["buffer.age_rule"] == "`drop`, `mask`, `exact`"
    assert shown["monitoring.wandb"] == "text or null"


def test_where_configurations_differ_each_exception_is_named() -> None:
    row = next(
        line
        for line in settings_page().splitlines()
        if line.startswith("| `algorithm.advantage` |")
    )
    assert "| `grpo`; `ppo_code`, `ppo_math`: `gae`; " in row


def test_the_page_opens_with_fifteen_settings_that_exist() -> None:
    opening = settings_page().partition("\n## The run")[0]
    rows = [line for line in opening.splitlines() if line[2:3].isdigit()]
    assert len(rows) == 15
    assert [row for row in rows if row.split("`")[1] not in settings()] == []
