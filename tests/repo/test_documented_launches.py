"""Every launch command of every document passes the whole composition and `--dry-run`.

The files that a command names are played: models have no weights, and a config.json of the size
that their name says. A command of a document about GPUs or clusters gets a machine that has what it
needs.
"""

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import code_lines, spans
from empty_model import write_model
from test_documents import DOCUMENTS, name

from async_rl.core.errors import ConfigError
from async_rl.launchers.commands import launch as command
from async_rl.launchers.preflight import checks as preflight

MACHINES = {
    # Two GPUs, as the page says; its text calculates with 80 GB.
    "docs/hardware.md": "cores=32,gpus=2,gpu_gb=80,memory_gb=256,disk_gb=2000",
}
HERE = "cores=8,gpus=0,memory_gb=128,disk_gb=1000"
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
ROW = {"prompt": "say 4", "answer": "#### 4", "limit": 4}
PYTHON_FILE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A block whose first line is the name of a file, which the reader writes."""
OWN_FILES = ("conf=my_task", "conf=experiment.", "conf=ppo_trainer.")
"""Files that another command of the document makes, or the reader writes."""


def launches(path: Path) -> Iterator[tuple[list[str], str]]:
    """The words of each launch command, and the line that follows it."""
    lines = [*spans(path), *code_lines(path), ""]
    for line, following in itertools.pairwise(lines):
        if re.match(r"(nohup )?async-rl launch .*conf=[^A-Z]", line) and "..." not in line:
            words = shlex.split(line, comments=True)
            yield list(itertools.takewhile(lambda word: word not in "|&>", words))[2:], following


COMMANDS = [
    pytest.param(name(path), words, following, id=f"{name(path)}-{number}")
    for path in DOCUMENTS
    for number, (words, following) in enumerate(launches(path))
]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files of the documents, which is also the working directory."""
    for model in ("models/1.5B", "models/my-model", "long_coder"):
        write_model(tmp_path / model, MODEL)
    (tmp_path / "data").mkdir()
    for file in ("data/train", "data/held_out", "train"):
        (tmp_path / f"{file}.jsonl").write_text(json.dumps(ROW) + "\n")
    for path in DOCUMENTS:
        for file, text in PYTHON_FILE.findall(path.read_text()):
            (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    # Neither a cluster nor its programs are here; what they are asked has its own tests.
    monkeypatch.setattr(
        preflight, "backend_of", lambda _: SimpleNamespace(problems=lambda _: iter(()))
    )
    return tmp_path


@pytest.mark.parametrize(("document", "words", "following"), COMMANDS)
def test_a_documented_launch_passes_a_dry_run(
    document: str,
    words: list[str],
    following: str,
    played: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [re.sub(r"(?<==)(\[?)/(?=models/|data/)", rf"\1{played}/", word) for word in words]
    machine = MACHINES.get(document, HERE)
    if "--machine" in given:
        place = given.index("--machine")
        machine = given[place + 1]
        del given[place : place + 2]
    settings = [word for word in given if not word.startswith("--")]
    if any(word.startswith(OWN_FILES) for word in settings):
        settings = [w for w in settings if not w.startswith(("conf=", "reward.terms."))]
        settings.insert(0, "conf=grpo_code")
    if following.startswith("error: "):
        with pytest.raises(ConfigError) as caught:
            command.launch(settings, dry_run=True, other_machine=machine)
        assert f"error: {caught.value}" == following
        return
    command.launch(settings, dry_run=True, other_machine=machine)
    assert "processes" in capsys.readouterr().out


def test_the_commands_are_found() -> None:
    documents = {param.values[0] for param in COMMANDS}
    assert {"docs/hardware.md", "docs/quickstart.md", "docs/cluster.md"} <= documents
    assert len(COMMANDS) > 15
