"""A package of plug-ins is installed next to the product and checked (its run: test_own_run.py)."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from composing import compose

from async_rl.config.plugins import DATA_SOURCE, REWARD, load_function
from async_rl.core.errors import ConfigError
from async_rl.core.machine import this_machine
from async_rl.launchers.preflight.checks import preflight

EXAMPLE = Path(__file__).resolve().parents[1] / "plugin_example"
PARTS = {"policy_loss": "plain_ratio", "policy_loss.correction": "half", "advantage": "above_mean"}
OBJECTIVE = [
    word
    for name, fn in PARTS.items()
    for word in (f"algorithm.{name}=plugin", f"algorithm.{name}.fn={fn}")
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the content of the example package's wheel."""
    folder = tmp_path_factory.mktemp("plugins")
    shutil.copytree(EXAMPLE, folder / "source")
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "source", check=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    return folder / "installed"


@pytest.fixture
def found(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))


@pytest.mark.usefixtures("found")
def test_a_plugin_is_found_by_its_function_and_by_its_entry_point() -> None:
    by_name = load_function("reward.fn", "my_plugins.task:short_answers", REWARD)
    assert load_function("reward.fn", "short_answers", REWARD) is by_name
    assert len(list(load_function("data.train_files", "sums", DATA_SOURCE)())) == 8


@pytest.mark.usefixtures("found")
def test_a_wrong_plugin_is_one_clear_error() -> None:
    for name, kind, message in (
        ("long_answers", REWARD, r"=long_answers: must be short_answers, or a function as"),
        ("my_plugins.nothing:rows", DATA_SOURCE, "my_plugins.nothing cannot be imported"),
        ("my_plugins.task:nothing", DATA_SOURCE, "my_plugins.task has no function nothing"),
        ("my_plugins.task:rows", REWARD, r"is called as rows\(sample\), which its parameters do"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_function("a.setting", name, kind)


def test_a_file_that_fails_with_a_missing_key_is_not_taken_for_one_without_the_function(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os\nTOKEN = os.environ['NO_SUCH_VARIABLE']\ndef score(sample): ...\n")
    with pytest.raises(ConfigError, match=r"cannot be imported \(KeyError: 'NO_SUCH_VARIABLE'\)"):
        load_function("reward.fn", f"{file}:score", REWARD)


@pytest.mark.usefixtures("found")
@pytest.mark.proves(
    "algorithm.policy_loss.fn", "algorithm.policy_loss.correction.fn", "algorithm.advantage.fn"
)
def test_loss_weights_and_advantages_are_those_of_the_plugins() -> None:
    import torch

    from async_rl.algorithms.parts import Parts
    from async_rl.learner import pass_loss

    algorithm = compose("grpo_code", OBJECTIVE).algorithm
    mask = torch.ones(3, dtype=torch.bool)
    sequences = Parts(index=torch.tensor([0, 0, 1]), count=2, mask=mask)
    log_ratio = torch.tensor([0.0, 1.0, 2.0])
    weights = pass_loss.correction(
        algorithm.policy_loss.correction, log_ratio, sequences=sequences
    ).weights
    assert weights.tolist() == [0.5, 0.5, 0.5]
    loss = pass_loss._policy_loss(
        algorithm.policy_loss,
        torch.log(torch.tensor([1.0, 2.0, 3.0])),
        proximal=torch.zeros(3),
        behavior=torch.zeros(3),
        advantages=torch.tensor([1.0, -1.0, 2.0]),
        behavior_weight=weights,
        sequences=sequences,
    ).loss
    torch.testing.assert_close(loss, torch.tensor([-0.5, 1.0, -3.0]))


@pytest.mark.usefixtures("found")
def test_a_wrong_part_of_the_objective_is_refused_before_a_run() -> None:
    for name in ("policy_loss", "policy_loss.correction", "advantage", "step_scale"):
        path = f"algorithm.{name}"
        words = [f"{path}=plugin", f"{path}.fn=my_plugins.task:rows"]
        with pytest.raises(ConfigError, match=rf"{path}.fn=my_plugins.task:rows: is called as row"):
            preflight(compose("grpo_code", words), this_machine())
        with pytest.raises(ConfigError, match=rf"{path}.fn=null: must be a valid string"):
            compose("grpo_code", words[:1])
    with pytest.raises(ConfigError, match=r"generation.engine=vlm: must be vllm, hf, counted, or"):
        preflight(compose("grpo_code", ["generation.engine=vlm"]), this_machine())
