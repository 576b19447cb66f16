"""Facts about where a rank of the learner computes."""

import pytest
import torch

from async_rl.errors import ConfigError
from async_rl.launchers.cluster import on_cluster
from async_rl.launchers.compose import compose
from async_rl.machine import Machine
from async_rl.processes.ranks import learner_device
from async_rl.topology import processes


def test_every_rank_computes_on_the_first_gpu_that_it_sees_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert learner_device(1) == torch.device("cuda", 0)
    assert learner_device(0) == torch.device("cpu"), "GPUs of the machine that it was not given are left alone"


def test_gpus_that_torch_cannot_use_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"learner.gpus_each=1 but torch .* finds no CUDA GPU here"):
        learner_device(1)


def test_a_process_that_asked_for_no_gpu_sees_none_of_its_node_and_the_cluster_names_those_of_the_others() -> None:
    config = compose("ppo_code", ["launcher=ray", "learner.gpus_each=1", "generators.gpus_each=0", "generation.vllm.kv_cache_mb=64"])
    specs = processes(config, Machine(cores=(0, 1), num_gpus=1, memory_mb=8000))
    visible = {spec.name: on_cluster(config, spec).env.get("CUDA_VISIBLE_DEVICES") for spec in specs}
    assert visible == {"buffer": "", "verifier-0": "", "generator-0": "", "learner-0": None}
