"""Rows as people have them, with a small random model: verl's parquet, the two files of AReaL, rows
on which a reward function fails.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e_support import LiveRun, async_rl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
SMALL = (
    "generation.engine=hf",
    "buffer.groups_per_step=2",
    "buffer.max_staleness_versions=1",
    "generation.group_size=2",
    "data.max_prompt_tokens=64",
    "data.max_response_tokens=8",
    "data.shuffle=false",
    "num_steps=2",
)
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if"
    " add_generation_prompt %}<assistant>{% endif %}"
)
LEADS = '''
"""The policy writes a few tokens, which are replaced by an answer that is right for even rows
and wrong for odd ones, so every score is known."""

async def answers(talk):
    await talk.write()
    truth = int(talk.row["reward_model"]["ground_truth"])
    return f"It is\\n#### {truth + talk.row['extra_info']['index'] % 2}"

async def programs(talk):
    await talk.write()
    reference = talk.row["solutions"][0]
    if talk.row["number"] % 2 == 0:
        return f"So:\\n```python\\n{reference}\\n```"
    return "```python\\nprint('something else')\\n```"

def fails(sample):
    import os, time
    how = sample.row["how"]
    if how == "raises":
        raise ZeroDivisionError("my mistake")
    if how == "exits":
        os._exit(7)
    if how == "hangs":
        time.sleep(1000)
    return {"nan": float("nan"), "text": "0.5"}.get(how, 0.75)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from async_rl.data.tokenizer import build_tokenizer

    path = tmp_path_factory.mktemp("model")
    words = (
        "Ann has apples and buys more. How many does she have? Print the sum of both numbers <user>"
        " <assistant>"
    )
    tokenizer: Any = build_tokenizer([words], 128)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(path)
    return path


@pytest.fixture
def leads(tmp_path: Path) -> str:
    (tmp_path / "leads.py").write_text(LEADS)
    return f"{tmp_path}/leads.py"


def groups_of(run: LiveRun, purpose: str) -> list[tuple[str, str, float | None, str, str]]:
    """(the row's id, state, mean reward, reason, message) of each group, in the order in which they
    were issued.
    """
    with sqlite3.connect(run.run_dir / "store.sqlite") as connection:
        query = (
            "SELECT substr(prompt_id, instr(prompt_id, '/') + 1), state, reward_mean, reason,"
            " message FROM groups"
        )
        return connection.execute(
            f"{query} WHERE purpose=? ORDER BY group_id", (purpose,)
        ).fetchall()


def test_rows_of_verl_are_templated_answered_scored_and_trained_with_ppo_math(
    launch: Launch, tmp_path: Path, model: Path, leads: str
) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [
                {
                    "role": "user",
                    "content": f"Ann has {i} apples and buys {i + 2} more. How many does she have?",
                }
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i + 2)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(7)
    ]
    for name, part in (("train", rows[:4]), ("val", rows[4:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{name}.parquet")
    files = (
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"model.path={model}",
    )
    run = launch(
        "conf=ppo_math",
        *SMALL,
        *files,
        f"rollout.fn={leads}:answers",
        "evaluation.every_steps=2",
        "evaluation.num_samples=2",
    )
    assert run.wait() == 0, run.terminal
    assert [row["reward/mean"] for row in run.rows if row["step"] in (1, 2)] == [0.5, 0.5]
    # Rows 4, 5 and 6 are evaluated once before the first step and once after the last: 4 and 6
    # pass.
    assert [row["eval/pass_at_1"] for row in run.rows if "eval/pass_at_1" in row] == pytest.approx(
        [2 / 3, 2 / 3]
    )
    assert sorted(prompt for prompt, *_ in groups_of(run, "eval")) == sorted(
        2 * [prompt for prompt, *_ in groups_of(run, "eval")[:3]]
    )
    assert len({prompt for prompt, *_ in groups_of(run, "eval")}) == 3
    # The newest steps can be read after the end.
    shown = async_rl("rollouts", str(run.run_dir), "--step", "2", "--best", "--num", "9").stdout
    assert "<user>Ann has 2 apples and buys 4 more. How many does she have?" in shown
    assert "<assistant>" in shown


def test_both_files_of_areal_are_joined_run_in_the_sandbox_and_trained_with_ppo_code(
    launch: Launch, tmp_path: Path, model: Path, leads: str
) -> None:
    tests = {"inputs": ["1 2\n", "5 -7\n"], "outputs": ["3\n", "-2\n"]}
    questions = [{"query_id": f"q{i}", "prompt": "Print the sum of both numbers"} for i in range(4)]
    reference = "a, b = map(int, input().split())\nprint(a + b)"
    metadata = [
        {
            "query_id": f"q{i}",
            "input_output": json.dumps(tests),
            "solutions": [reference],
            "number": i,
        }
        for i in range(4)
    ]
    for name, rows in (("code", questions), ("metadata", metadata)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = (
        f"data.train_files={tmp_path}/code.jsonl",
        f"data.metadata_file={tmp_path}/metadata.jsonl",
        f"model.path={model}",
    )
    # Without staleness no group overtakes another, so each step has one right and one wrong.
    files = (*files, "evaluation.every_steps=0", "buffer.max_staleness_versions=0")
    run = launch("conf=ppo_code", *SMALL, *files, f"rollout.fn={leads}:programs")
    assert run.wait() == 0, run.terminal
    trained = {
        prompt: reward
        for prompt, state, reward, *_ in groups_of(run, "train")
        if state == "trained"
    }
    assert trained == {"q0": 1.0, "q1": 0.0, "q2": 1.0, "q3": 0.0}
    assert [row["reward/part/tests_passed"] for row in run.rows if row["step"] > 0] == [0.5, 0.5]


def test_a_reward_function_that_fails_in_every_way_costs_only_the_groups_it_fails_on(
    launch: Launch, tmp_path: Path, model: Path, leads: str
) -> None:
    said = {
        "raises": "fails raised ZeroDivisionError: my mistake",
        "exits": "fails made its process exit with code 7",
        "hangs": "fails gave no score within 16 s (timeouts.group_s / 12)",
        "nan": "fails returned nan",
        "text": "fails returned '0.5'",
    }
    rows = [
        {"id": how, "prompt": "How many", "how": how}
        for how in ("good", *said, "fine", "well", "right")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        f"data.train_files={tmp_path}/rows.jsonl",
        f"model.path={model}",
        f"reward.terms.fails={leads}:fails",
        "evaluation.every_steps=0",
        "generation.max_attempts=2",
        "timeouts.group_s=192",
    )
    run = launch("conf=grpo_code", *SMALL, *settings)
    assert run.wait() == 0, run.terminal
    found = groups_of(run, "train")
    dropped = {
        prompt: message
        for prompt, state, _, reason, message in found
        if (state, reason) == ("dropped", "reward_failed")
    }
    assert dropped.keys() == said.keys()
    assert [
        how for how, sentence in said.items() if f"RewardError: {sentence}" not in dropped[how]
    ] == []
    assert [row["reward/mean"] for row in run.rows if row["step"] > 0] == [0.75, 0.75]
    assert {prompt for prompt, _, reward, *_ in found if reward is not None} == {
        "good",
        "fine",
        "well",
        "right",
    }
    # Each of both attempts counts once. A row has what the heartbeats had told before its step; the
    # function that hangs holds up the steps long enough for the first.
    counted = max(row.get("failures/reward_failed", 0) for row in run.rows)
    assert 1 <= counted <= 2 * len(said)
