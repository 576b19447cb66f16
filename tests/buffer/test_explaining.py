"""`async-rl explain` and `async-rl plan` on a run of 12 steps whose times are known."""

from __future__ import annotations

import asyncio
import functools
import re
import shutil
import sqlite3
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
from buffer_support import Clock, commit, make_config, make_group, opened, take, tickets
from starlette.testclient import TestClient
from warm_processes import run_command

from async_rl.buffer.store.schema import SCHEMA_VERSION
from async_rl.buffer.store.times import group_times
from async_rl.composition.compose import write_config
from async_rl.config import base
from async_rl.core.heads import pack_group
from async_rl.protocol.buffer import PutGroup
from async_rl.runs.forecast.recorded import read_times
from async_rl.runs.forecast.reports import explain
from async_rl.runs.forecast.scenario import profile_of
from async_rl.runs.status import config_of
from async_rl.runs.view.library import Library
from async_rl.runs.view.server import build_app, page_of

GENERATION_S, SCORING_S, LEARNER_S, NUM_STEPS = 0.8, 0.2, 0.5, 12


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups per step, synchronous: 1.5 s per step, of which the learner works 0.5 s."""
    path = tmp_path_factory.mktemp("runs") / "a<b>run"
    path.mkdir()
    config = make_config(max_staleness=0, num_steps=NUM_STEPS, group_size=4, recording="times")
    write_config(config, path / "config.yaml")
    rows = asyncio.run(make_history(path, config))
    lines = [msgspec.json.encode(row) for row in rows]
    (path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return path


async def make_history(path: Path, config: object) -> list[dict[str, float]]:
    clock, rows = Clock(), []
    async with opened(path, config, clock=clock) as service:  # type: ignore[arg-type]
        for version in range(NUM_STEPS):
            given = await tickets(service, version)
            clock.now += GENERATION_S + SCORING_S
            for ticket in given:
                group = make_group(ticket, versions=[version] * 3)
                moments = (0.1, GENERATION_S, GENERATION_S + SCORING_S)
                samples = [msgspec.structs.replace(t, clock=moments) for t in group.trajectories]
                group = msgspec.structs.replace(
                    group, trajectories=samples, generation_s=GENERATION_S
                )
                await service.put_group(PutGroup(payload=pack_group(group)))
            batch = await take(service, version)
            clock.now += LEARNER_S
            ids = [group.group_id for group in batch.groups]
            await commit(service, version + 1, ids)
            rows.append(
                {
                    "step": version + 1,
                    "time/step_s": 1.5,
                    "time/wait_batch_s": 1.0,
                    "weights/push_s": 0.0,
                    "stage_s/learner/training": LEARNER_S,
                    "wait_s/learner/a_batch": 1.0,
                    "stage_s/generator/generating": GENERATION_S,
                    "length/response_mean": 3.0,
                }
            )
    return rows


def test_the_table_shows_where_the_time_went(run_dir: Path) -> None:
    done = run_command(["explain", run_dir])
    assert done.returncode == 0, done.stderr
    assert "2400 steps/hour over 10 steps from step 3" in done.stdout
    assert "this run makes 2400 steps/hour (+0%); the learner waits 67% of the time" in done.stdout
    assert sum("█" in line for line in done.stdout.splitlines()) == 3


def test_a_report_is_a_page_that_needs_no_other_file(run_dir: Path) -> None:
    text = page_of(explain(run_dir))
    assert text.count("█</td>") == 3
    assert "a&lt;b&gt;run" in text
    assert "a<b>run" not in text
    assert not re.search(r"<script|<link|<img|https?://|url\(", text)


def test_a_plan_says_where_each_input_comes_from(run_dir: Path) -> None:
    words = ["generators.count=1..2", "buffer.groups_per_step=2,4"]
    done = run_command(["plan", run_dir, *words])
    assert done.returncode == 0, done.stderr
    assert "measured in a<b>run: generation, scoring" in done.stdout
    assert "assumed: 100% of the learner's time grows with the tokens" in done.stdout
    for path in ("generators.count", "buffer.groups_per_step"):
        assert path in done.stdout


def test_the_web_view_has_a_plan_and_names_settings_without_a_known_effect(run_dir: Path) -> None:
    client = TestClient(build_app(Library(run_dir.parent), token="secret"))
    assert client.get("/?token=secret").status_code == 200
    address = f"/runs/{quote(run_dir.name)}/plan"
    explained = client.get(address).text
    assert "2400 steps/hour over 10 steps from step 3" in explained
    swept = "generators.count=1..4 buffer.max_staleness_versions=0,1,2"
    text = client.get(address, params={"set": swept}).text
    # A row for each number of generators and each age bound.
    assert text[text.rindex("<tbody>") :].count("<tr>") == 12
    assert "measured in a&lt;b&gt;run" in text
    refused = client.get(address, params={"set": "generator.count=2"})
    assert (refused.status_code, "did you mean generators.count" in refused.text) == (404, True)


def test_a_long_run_is_explained_by_its_newest_groups(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = functools.partial(group_times, most=18)
    monkeypatch.setattr("async_rl.runs.forecast.recorded.group_times", newest)
    recorded, *_ = read_times(run_dir, config_of(run_dir))
    # The work of the two warm-up steps is left out.
    assert (len(recorded.step_s), len(recorded.train)) == (9, 14)
    assert recorded.steps_per_s == pytest.approx(2 / 3)


def test_the_start_of_the_verifiers_is_no_scoring_time(run_dir: Path, tmp_path: Path) -> None:
    """The samples of the first two steps wait for 0.4 s for a verifier that still starts."""
    slow = Path(shutil.copytree(run_dir, tmp_path / "slow"))
    with sqlite3.connect(slow / "store.sqlite") as store:
        for group_id, times in store.execute("SELECT group_id, times FROM groups").fetchall():
            samples = np.frombuffer(times, np.float32).reshape(-1, 4).copy()
            samples[:, 3] += 0.4 * (group_id < 4)
            row = samples.tobytes(), group_id
            store.execute("UPDATE groups SET times=? WHERE group_id=?", row)
    recorded, *_ = read_times(slow, config_of(slow))
    seconds = [score_s for work in recorded.train for score_s in work.scores]
    assert max(seconds) == pytest.approx(SCORING_S, abs=1e-3)


def test_a_plan_takes_the_setting_by_which_the_run_scores(run_dir: Path) -> None:
    config = base.replace(
        config_of(run_dir), verifiers=base.replace(config_of(run_dir).verifiers, cells=8)
    )
    assert profile_of(run_dir, config).scenario.config.verifiers.cells == 8
    done = run_command(["plan", run_dir, "verifiers.cells=1,2", "verifiers.count=1,4"])
    assert done.returncode == 0, done.stderr
    refused = run_command(["plan", run_dir, "reward.concurrency=2"])
    assert (refused.returncode, "as this run scores by verifiers.cells" in refused.stderr) == (
        2,
        True,
    )


def test_the_time_in_which_a_resumed_run_was_ended_is_no_time_of_the_run(
    run_dir: Path, tmp_path: Path
) -> None:
    """1,000 s between the last step of one life and the first of the next."""
    resumed = Path(shutil.copytree(run_dir, tmp_path / "resumed"))
    with sqlite3.connect(resumed / "store.sqlite") as store:
        ((ended_s,),) = store.execute("SELECT committed_s FROM steps WHERE version=6")
        store.execute("UPDATE steps SET committed_s=committed_s+1000 WHERE version > 6")
        store.execute("UPDATE transitions SET at_s=at_s+1000 WHERE at_s > ?", (ended_s,))
        store.execute("INSERT INTO lives VALUES (99, 'again', 6, ?)", (ended_s + 999,))
    recorded, *_ = read_times(resumed, config_of(resumed))
    assert recorded.steps_per_s == pytest.approx(2 / 3)
    shown = run_command(["explain", resumed])
    assert "2400 steps/hour over 10 steps from step 3" in shown.stdout


def test_what_cannot_be_forecast_is_refused_with_what_is_possible(
    run_dir: Path, tmp_path: Path
) -> None:
    for words, reason in (
        ([run_dir, "learner.lr=1"], "the forecast knows no effect of learner.lr"),
        (["generators.count=2"], "generators.count=2"),
    ):
        refused = run_command(["plan", *words])
        assert (refused.returncode, reason in refused.stderr) == (2, True), refused.stderr
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    with sqlite3.connect(copy / "store.sqlite") as store:
        store.execute("UPDATE groups SET times=NULL")
    shown = run_command(["explain", copy])
    assert shown.returncode == 0, shown.stderr
    assert "generating" in shown.stdout
    assert "no forecast: copy has no times of samples" in shown.stdout
    refused = run_command(["plan", copy, "generators.count=2"])
    assert (refused.returncode, "recording=times" in refused.stderr) == (2, True)


OTHER_VERSION = (
    f"has store schema 7, this version of async-rl reads {SCHEMA_VERSION};"
    " use the version that made it"
)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("other version", OTHER_VERSION),
        ("no store", "does not exist: the run has stored nothing yet"),
        ("cut off", "is not a usable store"),
    ],
)
def test_without_a_usable_store_the_reason_and_what_the_metrics_have_are_shown(
    run_dir: Path, tmp_path: Path, damage: str, reason: str
) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    file = copy / "store.sqlite"
    if damage == "other version":
        with sqlite3.connect(file) as store:
            store.execute("PRAGMA user_version=7")
    elif damage == "cut off":
        file.write_bytes(file.read_bytes()[:6000])
    else:
        file.unlink()
    shown = run_command(["explain", copy])
    assert shown.returncode == 0, shown.stderr
    assert "copy: 2400 steps/hour over 10 steps from step 3" in shown.stdout
    assert "generating" in shown.stdout
    assert reason in shown.stdout
    for words in (["plan", copy, "generators.count=2"], ["replay", copy]):
        refused = run_command(words)
        assert (refused.returncode, reason in refused.stderr) == (1, True), refused.stderr
    compared = run_command(["compare", run_dir, copy])
    assert compared.returncode == 0, compared.stderr
    assert f"the steps cannot be compared: {file} {reason}" in compared.stdout
    assert "seconds per step" in compared.stdout


def test_without_trajectories_only_the_replay_and_the_tokens_are_missing(
    run_dir: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    with sqlite3.connect(copy / "store.sqlite") as store:
        store.execute("DELETE FROM blobs WHERE group_id < 6")
    refused = run_command(["replay", copy])
    assert refused.returncode == 2
    assert "its batches are recorded for steps 4 to 12" in refused.stderr
    assert "keep more with recording=full and checkpoint.keep" in refused.stderr
    with sqlite3.connect(copy / "store.sqlite") as store:
        store.execute("DELETE FROM blobs")
    refused = run_command(["replay", copy])
    assert refused.returncode == 2
    assert "has no recorded batch" in refused.stderr
    for words in (["explain", copy], ["plan", copy, "generators.count=2"]):
        assert run_command(words).returncode == 0
    compared = run_command(["compare", run_dir, copy])
    assert compared.returncode == 0, compared.stderr
    assert "no difference in the 12 steps that both runs have" in compared.stdout
    assert "not compared: the trajectories are not stored in both runs" in compared.stdout


def test_a_run_of_other_settings_than_this_version_has_is_named_by_every_command(
    run_dir: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    with (copy / "config.yaml").open("a") as config:
        config.write("\nnew_setting: 3\n")
    for words in (
        ["explain", copy],
        ["plan", copy, "generators.count=2"],
        ["replay", copy],
        ["compare", run_dir, copy],
    ):
        refused = run_command(words)
        assert refused.returncode == 2
        assert "new_setting=3: there is no such setting" in refused.stderr
        assert "read this run with the version that made it" in refused.stderr
