"""`async-rl explain` and `async-rl plan` on a run of 12 steps whose times are known."""

import asyncio
import re
import shutil
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from buffer_support import Clock, commit, make_config, opened, put, rows, taken_ids, tickets
from command_line import Answer, Command
from starlette.testclient import TestClient

from async_rl.buffer.store.schema import SCHEMA_VERSION
from async_rl.composition.compose import write_config
from async_rl.config import base
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
    lines = [msgspec.json.encode(row) for row in asyncio.run(make_history(path, config))]
    (path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return path


async def make_history(path: Path, config: object) -> list[dict[str, float]]:
    clock, metrics = Clock(), []
    async with opened(path, config, clock=clock) as service:  # type: ignore[arg-type]
        for version in range(NUM_STEPS):
            given = await tickets(service, version)
            clock.now += GENERATION_S + SCORING_S
            moments = (0.1, GENERATION_S, GENERATION_S + SCORING_S)
            for ticket in given:
                await put(service, ticket, clock=moments, generation_s=GENERATION_S)
            batch = await taken_ids(service, version)
            clock.now += LEARNER_S
            await commit(service, version + 1, batch)
            metrics.append(
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
    return metrics


def copied(run_dir: Path, tmp_path: Path, *changes: str) -> Path:
    """A copy of the run, after these changes of its store."""
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    for sql in changes:
        rows(copy, sql)
    return copy


def test_the_table_shows_where_the_time_went(run_dir: Path, command: Command) -> None:
    done = command("explain", run_dir)
    assert done.code == 0, done.err
    assert "2400 steps/hour over 10 steps from step 3" in done.out
    assert "this run makes 2400 steps/hour (+0%); the learner waits 67% of the time" in done.out
    assert sum("█" in line for line in done.out.splitlines()) == 3
    text = page_of(explain(run_dir))
    assert text.count("█</td>") == 3
    assert "a&lt;b&gt;run" in text
    assert "a<b>run" not in text
    assert not re.search(r"<script|<link|<img|https?://|url\(", text)


def test_the_web_view_has_a_plan_and_names_settings_without_a_known_effect(run_dir: Path) -> None:
    client = TestClient(build_app(Library(run_dir.parent), token="secret"))
    assert client.get("/?token=secret").status_code == 200
    address = f"/runs/{quote(run_dir.name)}/plan"
    assert "2400 steps/hour over 10 steps from step 3" in client.get(address).text
    swept = "generators.count=1..2 buffer.max_staleness_versions=0,1"
    text = client.get(address, params={"set": swept}).text
    # A row for each number of generators and each age bound.
    assert text[text.rindex("<tbody>") :].count("<tr>") == 4
    assert "measured in a&lt;b&gt;run" in text
    refused = client.get(address, params={"set": "generator.count=2"})
    assert (refused.status_code, "did you mean generators.count" in refused.text) == (404, True)


def test_the_time_in_which_a_run_was_ended_does_not_count(run_dir: Path, tmp_path: Path) -> None:
    """1,000 s between the last step of one life and the first of the next."""
    ended_s = "(SELECT committed_s FROM steps WHERE version=6)"
    resumed = copied(
        run_dir,
        tmp_path,
        f"UPDATE transitions SET at_s=at_s+1000 WHERE at_s > {ended_s}",
        f"INSERT INTO lives VALUES (99, 'again', 6, {ended_s} + 999)",
        "UPDATE steps SET committed_s=committed_s+1000 WHERE version > 6",
    )
    recorded, *_ = read_times(resumed, config_of(resumed))
    assert recorded.steps_per_s == pytest.approx(2 / 3)


def answers(command: Command, run_dir: Path, copy: Path) -> dict[str, Answer]:
    """What the commands about the recorded times and batches say of the copy."""
    return {
        "explain": command("explain", copy),
        "plan": command("plan", copy, "generators.count=2"),
        "replay": command("replay", copy),
        "compare": command("compare", run_dir, copy),
    }


def test_what_cannot_be_forecast_is_refused_with_what_is_possible(
    run_dir: Path, tmp_path: Path, command: Command
) -> None:
    config = config_of(run_dir)
    config = base.replace(config, verifiers=base.replace(config.verifiers, cells=8))
    assert profile_of(run_dir, config).scenario.config.verifiers.cells == 8
    assert command("plan", run_dir, "verifiers.cells=1,2").code == 0
    copy = copied(run_dir, tmp_path, "UPDATE groups SET times=NULL")
    for words, reason in (
        ([run_dir, "reward.concurrency=2"], "as this run scores by verifiers.cells"),
        ([run_dir, "learner.lr=1"], "the forecast knows no effect of learner.lr"),
        (["generators.count=2"], "generators.count=2"),
        ([copy, "generators.count=2"], "recording=times"),
    ):
        refused = command("plan", *words)
        assert (refused.code, reason in refused.err) == (2, True), refused.err
    shown = command("explain", copy)
    assert shown.code == 0, shown.err
    assert "generating" in shown.out
    assert "no forecast: copy has no times of samples" in shown.out


OTHER_VERSION = f"has store schema 7, this version of async-rl reads {SCHEMA_VERSION};"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("other version", f"{OTHER_VERSION} use the version that made it"),
        ("no store", "does not exist: the run has stored nothing yet"),
    ],
)
def test_without_a_usable_store_the_reason_and_what_the_metrics_have_are_shown(
    run_dir: Path, tmp_path: Path, damage: str, reason: str, command: Command
) -> None:
    copy = copied(run_dir, tmp_path)
    file = copy / "store.sqlite"
    if damage == "other version":
        rows(copy, "PRAGMA user_version=7")
    else:
        file.unlink()
    found = answers(command, run_dir, copy)
    assert {name: answer.code for name, answer in found.items()} == {
        "explain": 0,
        "plan": 1,
        "replay": 1,
        "compare": 0,
    }
    for text in ("copy: 2400 steps/hour over 10 steps from step 3", "generating", reason):
        assert text in found["explain"].out
    assert reason in found["plan"].err
    assert reason in found["replay"].err
    assert f"the steps cannot be compared: {file} {reason}" in found["compare"].out
    assert "seconds per step" in found["compare"].out


def test_without_trajectories_only_the_replay_and_the_tokens_are_missing(
    run_dir: Path, tmp_path: Path, command: Command
) -> None:
    copy = copied(run_dir, tmp_path, "DELETE FROM blobs WHERE group_id < 6")
    refused = command("replay", copy)
    assert refused.code == 2
    assert "its batches are recorded for steps 4 to 12" in refused.err
    assert "keep more with recording=full and checkpoint.keep" in refused.err
    rows(copy, "DELETE FROM blobs")
    found = answers(command, run_dir, copy)
    assert [answer.code for answer in found.values()] == [0, 0, 2, 0]
    assert "has no recorded batch" in found["replay"].err
    assert "no difference in the 12 steps that both runs have" in found["compare"].out
    assert "not compared: the trajectories are not stored in both runs" in found["compare"].out
    with (copy / "config.yaml").open("a") as config:
        config.write("\nnew_setting: 3\n")
    # A run of other settings than this version has is named by every command.
    for refused in answers(command, run_dir, copy).values():
        assert refused.code == 2
        assert "new_setting=3: there is no such setting" in refused.err
        assert "read this run with the version that made it" in refused.err
