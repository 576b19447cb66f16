"""Facts about what is looked at on the machine before a run starts."""

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from tables import table

from async_rl.composition.compose import compose
from async_rl.composition.hardware import model_shape, pretended_machine
from async_rl.composition.overrides import with_defaults
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine
from async_rl.launchers.preflight.checks import preflight
from async_rl.launchers.preflight.inputs import row_problems
from async_rl.planning.estimate import disk_mb
from async_rl.training.checkpoints import directory_of

MACHINE = Machine(cores=(0, 1), num_gpus=0, memory_mb=8000)
PINNED = ("generators.cores=[0]", "learner.cores=[1]")


def problems(tmp_path: Path, *overrides: str) -> list[str]:
    defaults = (*PINNED, f"output_dir={tmp_path}/runs")
    config = compose("ppo_code", with_defaults(overrides, defaults))
    try:
        preflight(config, MACHINE)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_a_package_or_headers_that_the_verifier_could_not_load_are_named_before_anything_starts(
    tmp_path: Path,
) -> None:
    headers = f"sandbox.checker_headers={tmp_path}/x"
    found = problems(tmp_path, "sandbox.packages=[numpy,no_such_package]", headers)
    assert [line.split(":")[0] for line in found] == ["sandbox.packages=no_such_package", headers]


def test_a_grammar_that_xgrammar_refuses_is_named_before_anything_starts(tmp_path: Path) -> None:
    train, schema = "generation.sampling=['grammar=(ab']", '{"type": "number", "multipleOf": 5}'
    found = problems(tmp_path, train, """evaluation.sampling=['grammar={"type": 7}']""")
    assert found[0].startswith("generation.sampling: the grammar '(ab' is refused: ")
    assert found[1].startswith("""evaluation.sampling: the grammar '{"type": 7}' is refused: """)
    (line,) = problems(tmp_path, f"generation.sampling=['grammar={schema}']")
    assert line.startswith(
        "generation.sampling: the schema of the answer has #/multipleOf=5, which"
    )
    assert problems(tmp_path, "generation.sampling=['grammar=(ab)+']") == []


def test_files_that_are_missing_or_empty_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    val_files = f"data.val_files=[{tmp_path}/empty.jsonl,s3://b/c.jsonl]"
    train_files = f"data.train_files=[{tmp_path}/none.jsonl]"
    found = problems(tmp_path, "model.path=owner/name", train_files, val_files)
    assert [line.partition(";")[0] for line in found] == [
        f"data.train_files: {tmp_path}/none.jsonl: there is no such file",
        f"data.val_files: {tmp_path}/empty.jsonl: is empty",
    ]


def test_names_places_and_hosts_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    assert problems(tmp_path) == []
    assert list(tmp_path.iterdir()) == [], "a check leaves nothing behind"
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "file").touch()
    for words, expected in (
        ("run_name=mine", f"run_name=mine: {tmp_path}/runs/mine exists already; choose another"),
        (f"output_dir={tmp_path}/file/runs", "is not a directory that may be written to"),
        ("network.host=192.0.2.1", "=192.0.2.1: 192.0.2.1:0 cannot be bound (Cannot assign"),
        ("network.host=ib9", "=ib9: is neither an address nor a network interface"),
    ):
        (line,) = problems(tmp_path, words)
        assert expected in line


QWEN = '{"model_type": "qwen3"}'


def weights(named: int, written: int, name: str = "a") -> bytes:
    """Return a safetensors file with a header that names so many bytes of a tensor."""
    header = {name: {"dtype": "U8", "shape": [named], "data_offsets": [0, named]}}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(written)


def write_model(directory: Path, config: str, content: bytes) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config)
    (directory / "tokenizer.json").write_text('{"model": {}}')
    (directory / "model.safetensors").write_bytes(content)


DAMAGED = "model.safetensors is missing or damaged"


@pytest.mark.parametrize(
    ("config", "content", "index", "problem"),
    [
        (QWEN, weights(8, 8), None, None),
        ("{}", weights(8, 8), None, "model_type=None of config.json is unknown"),
        ('{"model_type":', weights(8, 8), None, "config.json, tokenizer.json or model.safetensors"),
        (QWEN, weights(8, 3), None, DAMAGED),
        (QWEN, b"version https://git-lfs", None, DAMAGED),
        (QWEN, weights(8, 8), "b.safetensors", "b.safetensors is missing or damaged"),
    ],
)
def test_a_damaged_model_is_refused_before_anything_starts(
    tmp_path: Path, config: str, content: bytes, index: str | None, problem: str | None
) -> None:
    write_model(tmp_path / "model", config, content)
    if index is not None:
        text = json.dumps({"weight_map": {"a": index}})
        (tmp_path / "model" / "model.safetensors.index.json").write_text(text)
    found = problems(tmp_path, f"model.path={tmp_path}/model")
    assert len(found) == (problem is not None), found
    assert problem is None or problem in found[0]


def test_a_model_directory_must_hold_a_model_with_enough_positions(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, f"model.path={tmp_path}/none")
    assert "there is no such directory" in line
    (tmp_path / "model").mkdir()
    (line,) = problems(tmp_path, f"model.path={tmp_path}/model")
    assert "lacks config.json and a tokenizer (tokenizer.json) and weights" in line
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 100, "intermediate_size": 128, "max_position_embeddings": 96}
    config = json.loads(QWEN) | sizes | {"tie_word_embeddings": True}
    write_model(tmp_path / "model", json.dumps(config), weights(8, 8))
    lengths = ("data.max_prompt_tokens=64", "data.max_response_tokens=64")
    (line,) = problems(tmp_path, f"model.path={tmp_path}/model", *lengths)
    assert "= 128 is above the 96 positions of the model" in line
    assert model_shape(compose("ppo_code", ["model.path=owner/name"])) is None


@pytest.mark.parametrize(("target", "is_there"), [("o_proj", True), ("linear_qkv", False)])
def test_an_adapter_of_layers_that_no_weight_has_is_refused(
    tmp_path: Path, target: str, is_there: bool
) -> None:
    content = weights(8, 8, "model.layers.0.self_attn.o_proj.weight")
    write_model(tmp_path / "model", QWEN, content)
    adapter = ("model.lora=lora", f"model.lora.targets=[{target}]")
    found = problems(tmp_path, f"model.path={tmp_path}/model", *adapter)
    assert [line.partition("=")[0] for line in found] == ["model.lora.targets"] * (not is_there)


def set_free_mb(monkeypatch: pytest.MonkeyPatch, free_mb: int) -> None:
    usage = SimpleNamespace(total=0, used=0, free=free_mb << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_a_full_disk_is_refused_with_both_numbers_or_that_of_a_described_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free_mb(monkeypatch, 3)
    (line,) = problems(tmp_path)
    assert "3 MB are free there, the run needs about" in line
    config = compose("ppo_code", [*PINNED, f"output_dir={tmp_path}/runs", "checkpoint.keep=100000"])
    described = "cores=2,gpus=0,memory_gb=8"
    with pytest.raises(ConfigError, match="10240 MB are free there, the run needs about"):
        preflight(config, pretended_machine(f"{described},disk_gb=10"))
    preflight(config, pretended_machine(f"{described},disk_gb=1000000"))
    preflight(config, pretended_machine(described))


def test_a_resumed_run_needs_only_what_is_not_on_the_disk_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose("ppo_code", [*PINNED, f"output_dir={tmp_path}", "run_name=mine"])
    run_dir = tmp_path / "mine"
    checkpoint = directory_of(run_dir, 5)
    checkpoint.mkdir(parents=True)
    needed_mb = disk_mb(config, model_shape(config))

    def with_free(free_mb: int) -> None:
        set_free_mb(monkeypatch, free_mb)
        preflight(config, MACHINE, run_dir=run_dir)

    with_free(needed_mb)
    for path in (run_dir / "store.sqlite", checkpoint / "rank_0000.safetensors"):
        path.write_bytes(bytes(8 << 20))
    # What another command has put into the directory is not a part of the run.
    replayed = run_dir / "replays" / "1" / "rank_0.log"
    replayed.parent.mkdir(parents=True)
    replayed.write_bytes(bytes(8 << 20))
    with_free(needed_mb - 16)
    with pytest.raises(ConfigError, match=rf"the run needs about {needed_mb - 16} MB"):
        with_free(needed_mb - 17)


def test_a_mirror_that_holds_a_run_of_that_name_or_cannot_be_used_is_named(tmp_path: Path) -> None:
    place = tmp_path / "copies"
    (place / "mine").mkdir(parents=True)
    mine = ("run_name=mine", f"checkpoint.mirror={place}")
    assert problems(tmp_path, *mine) == []
    (place / "mine" / "step_000005.complete").touch()
    (held,) = problems(tmp_path, *mine)
    assert held.startswith(f"checkpoint.mirror={place}: holds a run mine already; choose another")
    assert problems(tmp_path, "run_name=other", f"checkpoint.mirror={place}") == []
    (unknown,) = problems(tmp_path, "checkpoint.mirror=nowhere://x")
    assert unknown.startswith("checkpoint.mirror=nowhere://x cannot be used")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (board,) = problems(tmp_path, f"monitoring.tensorboard_port={port}")
        assert problems(tmp_path, "monitoring.tensorboard_port=null") == []
        (prometheus,) = problems(tmp_path, f"monitoring.prometheus_port={port}")
    refused = f"127.0.0.1:{port} cannot be bound (Address already in use);"
    assert board.startswith(f"monitoring.tensorboard_port={port}: {refused}")
    assert prometheus.startswith(f"monitoring.prometheus_port={port}: {refused}")
    assert problems(tmp_path, f"monitoring.tensorboard_port={port}") == []


GOOD = {"prompt": "add the numbers", "tests": [{"kind": "stdin", "input": "1", "output": "1"}]}


def row_problems_of(tmp_path: Path, rows: list[dict[str, object]] | str, *words: str) -> list[str]:
    file = tmp_path / "rows.jsonl"
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(text)
    overrides = [f"data.train_files=[{file}]", "model.path=owner/name", "evaluation.every_steps=0"]
    return list(row_problems(compose("grpo_code", [*overrides, *words])))


@pytest.mark.parametrize(("rows", "reason"), table(__file__, "unusable"))
def test_a_row_that_cannot_be_used_is_named_once(
    tmp_path: Path, rows: list[dict[str, object]] | str, reason: str
) -> None:
    listed = row_problems_of(tmp_path, rows)
    assert len(listed) == 1, listed
    assert listed[0].startswith("data.train_files: ")
    assert reason in listed[0]


def test_an_engine_or_a_root_file_system_that_is_missing_is_named(tmp_path: Path) -> None:
    test = {"kind": "container", "image": "my", "command": ["true"]}
    rows: list[dict[str, object]] = [{"prompt": "x", "tests": [test]}] * 2
    (tmp_path / "podman").write_text("#!/bin/sh\necho null")
    (tmp_path / "podman").chmod(0o755)
    (listed,) = row_problems_of(tmp_path, rows, "sandbox.container_engine=[no-such-engine]")
    assert "containers need no-such-engine, which does not work here: No such file" in listed
    engine = f"sandbox.container_engine=[{tmp_path}/podman]"
    (listed,) = row_problems_of(tmp_path, rows, engine, f"sandbox.rootfs={{my: {tmp_path}/none}}")
    assert "none is not a directory of this machine" in listed
    assert row_problems_of(tmp_path, rows, engine, f"sandbox.rootfs={{my: {tmp_path}}}") == []


def test_rows_that_may_be_dropped_and_later_ones_are_left_to_the_run(tmp_path: Path) -> None:
    assert row_problems_of(tmp_path, [GOOD, {"prompt": "x"}], "data.bad_rows=drop") == []
    assert row_problems_of(tmp_path, [GOOD] * 20 + [{}]) == []
    assert len(row_problems_of(tmp_path, [GOOD] * 19 + [{}])) == 1
    # A byte order mark is no part of a row.
    assert row_problems_of(tmp_path, "\ufeff" + json.dumps(GOOD)) == []
