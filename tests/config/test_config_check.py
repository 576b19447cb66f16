"""Facts about combinations of settings that are refused."""

import pytest

from async_rl.composition.compose import compose, compose_unchecked
from async_rl.config.checks.machine import machine_problems
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine

SHARED_GPU = ("placement=colocated", "learner.gpus_each=0.5", "generators.gpus_each=0.5")
FILES = ("model.path=owner/name", "data.train_files=/d/a.jsonl")


@pytest.mark.covers("top_p, top_k, min_new_tokens")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.advantage.critic.warmup_steps=3", "num_steps=3"], "is not below num_steps=3"),
        (
            ["algorithm.advantage=vtrace", "algorithm.policy_loss.correction=sequence_tis"],
            "would count again; set algorithm.policy_loss.correction=token_tis",
        ),
        (
            ["algorithm.advantage=vtrace", "algorithm.policy_loss=gspo"],
            "algorithm.policy_loss.correction=sequence_tis with algorithm.advantage=vtrace",
        ),
        (
            ["algorithm=grpo", "algorithm.truncated=bootstrap"],
            "no critic predicts the value after a truncated sample; set algorithm.truncated=train",
        ),
        (["algorithm=grpo", "generation.group_size=1"], "set generation.group_size to at least 2"),
        (["generation.vllm.max_num_seqs=4"], "is below generation.group_size=8"),
        (["generation.vllm.max_num_batched_tokens=64"], "is below max_num_seqs=256"),
        (
            ["generation.vllm.tensor_parallel_size=2", "generators.gpus_each=1"],
            "set generators.gpus_each=2",
        ),
        (
            [
                "generation.vllm.tensor_parallel_size=2",
                "generation.vllm.extra=pipeline_parallel_size=2",
                "generators.gpus_each=2",
            ],
            "set generators.gpus_each=4",
        ),
        (["generation.vllm.extra=dtype=float16"], "set model.dtype"),
        (["generation.vllm.kv_cache_mb=0"], "the size of the KV cache is unknown"),
        (
            ["generators.autoscale=[3,2]"],
            "generators.autoscale=[3, 2]: give the fewest and the most generators",
        ),
        (
            ["placement=colocated", "weights.push_every_steps=3", "num_steps=2"],
            "lower it to at most 2",
        ),
        (
            ["placement=colocated", "buffer.max_staleness_versions=5"],
            "set it to at most 2, or weights.push_every_steps to at least 3",
        ),
        (
            ["placement=colocated", "generators.autoscale=[1,8]"],
            "nothing to balance; set generators.autoscale=[]",
        ),
        (["placement=colocated", "weights.transfer=filesystem"], "set weights.transfer=auto"),
        (
            ["weights.transfer=ipc"],
            (
                "set placement=colocated, generation.engine=vllm, learner.ranks=1, and"
                " gpus_each=0.5 for both"
            ),
        ),
        (["placement=colocated", "weights.transfer=ipc"], "or set weights.transfer=auto"),
        (
            [*SHARED_GPU, "generation.engine=hf", "weights.transfer=ipc"],
            "a vLLM generator and a learner of one rank share",
        ),
        (["placement=colocated", "launcher=slurm"], "set launcher=local inside a job of one node"),
        (
            [
                "placement=colocated",
                "generators.pools.other.count=1",
                "generators.pools.other.work=train",
            ],
            "generators of one pool only; remove this pool",
        ),
        (["placement=colocated", "learner.gpus_each=0.5"], "set both to 0.5, or both to 0"),
        (
            ["placement=colocated", "learner.gpus_each=1", "generators.gpus_each=1"],
            "whole GPUs cannot be shared; set both to 0.5",
        ),
        (
            [
                "placement=colocated",
                "learner.gpus_each=0.5",
                "generators.gpus_each=2",
                "generation.vllm.tensor_parallel_size=2",
            ],
            "set generation.vllm.tensor_parallel_size=1",
        ),
        (
            [
                "placement=colocated",
                "learner.gpus_each=0.5",
                "generators.gpus_each=0.25",
                "generators.count=2",
            ],
            (
                "generators.count=2 and learner.ranks=1 with placement=colocated: each device has"
                " one generator and one rank; set generators.count=1"
            ),
        ),
        (["learner.minibatches=3"], "set learner.minibatches to one of 1, 2, 4, 8, 16"),
        (["learner.minibatches=8", "learner.ranks=3"], "a minibatch has 2 groups"),
        (
            [
                "learner.budget_tokens=100",
                "data.max_prompt_tokens=60",
                "data.max_response_tokens=41",
            ],
            "raise learner.budget_tokens to at least 101",
        ),
        (
            [
                "algorithm=grpo",
                "algorithm.advantage=reinforce_plus_plus_baseline",
                "generation.group_size=1",
            ],
            "has no other samples to compare",
        ),
        (["algorithm.policy_loss=reinforce"], "every update but the first would be wrong"),
        (
            ["algorithm=grpo", "algorithm.policy_loss.max_mean_ratio=5"],
            "always 1; set algorithm.policy_loss.max_mean_ratio=null",
        ),
        (["algorithm.policy_loss.correction=none"], "set buffer.max_staleness_versions=0"),
        (["reward.overlong_tokens=65"], "lower it to at most 64"),
        (["generation.generation_size=4"], "is below generation.group_size=8"),
        (["generation.generation_size=300"], "is below generation.group_size=300"),
        (["reward.placement=steps"], "does not show progress between steps"),
        (
            [
                "reward.placement=steps",
                "reward.mode=fraction",
                "reward.extraction=whole",
            ],
            "a response without blocks is one step",
        ),
        (["reward.fail_reward=2"], "the policy would learn to fail"),
        (["reward.scale=-1"], "turn a pass into -1 and a fail into 0"),
        (["reward.bias=-5", "reward.clip=1"], "turn a pass into 1 and a fail into 1"),
        (
            ["learner.optimizer.betas=[0.9,1.0]"],
            "learner.optimizer.betas=[0.9, 1.0]",
        ),
        (["learner.optimizer.schedule_span=[5]"], "a later last step, as in [5,60]"),
        (["learner.optimizer.schedule_span=[50,5]"], "schedule_span=[50.0, 5.0]: the cosine needs"),
        (
            ["weights.push_every_steps=2", "buffer.age_rule=exact"],
            "weights.push_every_steps=2 with buffer.age_rule=exact: every batch needs the weights",
        ),
        (
            ["weights.push_every_steps=2", "buffer.max_staleness_versions=0"],
            "raise buffer.max_staleness_versions to at least 1",
        ),
        (
            ["weights.transfer=filesystem", "launcher=ray", "launcher.shared_run_dir=false"],
            "set weights.transfer.path to a URL that all nodes can read",
        ),
        (["timeouts.group_s=24"], "not above sandbox.timeout_s=6: "),
        (["timeouts.group_s=48", "reward.mode=fraction"], "for each of the 2 tests"),
        (["run_name=a/b"], "becomes a directory's name"),
        (["network.host=0.0.0.0"], "is not an address to connect to"),
        (["launcher=ray", "network.host=127.0.0.1"], "other machines cannot reach it"),
        (
            ["launcher=slurm", "launcher.nodes=2", "network.host=127.0.0.1"],
            "other machines cannot reach it",
        ),
        (
            [
                "launcher=ray",
                "launcher.gpus_per_node=2",
                "learner.ranks=4",
                "learner.gpus_each=1",
            ],
            "the learner's ranks run on the supervisor's node",
        ),
        (
            ["launcher=slurm", "generators.gpus_each=0.5"],
            "launcher=slurm assigns whole GPUs to a process; set it to 1",
        ),
        (
            ["launcher=slurm", 'launcher.extra=["--cpus-per-task=2"]', "launcher.learner_cpus=4"],
            "a process needs 4 (verifiers.cells, launcher.generator_cpus, launcher.learner_cpus)",
        ),
        (
            ["data.train_files=/d/a.jsonl", "evaluation.every_steps=0"],
            "set model.path=<directory or hub name>",
        ),
        (["data.val_files=/d/a.jsonl"], "data.train_files is empty"),
        ([*FILES, "evaluation.every_steps=5"], "set data.val_files=<file>, or evaluation"),
        ([*FILES, "data.val_files=/d/a.jsonl"], "is also in data.train_files"),
        ([*FILES, "data.val_files=/d/b.csv"], "name a .jsonl, .json or .parquet file"),
        (
            [
                "model.path=owner/name",
                "data.train_files=[/d/a.jsonl,/d/a.jsonl]",
                "evaluation.every_steps=0",
            ],
            "is named twice",
        ),
        (["learner.gpus_each=2"], "a rank uses one GPU"),
        (["learner.gpus_each=0.5", "learner.ranks=2"], "NCCL needs a whole GPU per rank"),
        (["learner.offload=optimizer"], "the learner is already in host memory"),
        (["evaluation.num_samples=4", "evaluation.temperature=0"], "set evaluation.num_samples=1"),
        (["data.filter.above=0.2", "data.filter.below=0.2"], "every prompt would be removed"),
        (
            ["data.filter.above=10"],
            "data.filter.above=10: no reward is above it, because reward.clip=10",
        ),
        (
            ["data.filter.below=-10"],
            "data.filter.below=-10: no reward is below it, because reward.clip=10",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_its_remedy(
    overrides: list[str], expected: str
) -> None:
    compose_unchecked("ppo_code", overrides)
    with pytest.raises(ConfigError) as caught:
        compose("ppo_code", overrides)
    (line,) = str(caught.value).splitlines()
    assert expected in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.kl=none"],
        ["algorithm.policy_loss.correction=token_mis", "algorithm.policy_loss.correction.min=0.5"],
        ["algorithm.policy_loss.correction=none", "buffer.max_staleness_versions=0"],
        ["algorithm.policy_loss.correction=none", "algorithm.policy_loss=ppo_vanilla"],
        ["algorithm.advantage=vtrace"],
        ["algorithm.advantage=remax"],
        ["algorithm=grpo", "algorithm.advantage=gae"],
        ["algorithm.policy_loss.correction=token_mis"],
        ["algorithm.policy_loss=ppo_vanilla"],
        ["algorithm.aggregation=sequence_sum"],
        ["algorithm.policy_loss.max_mean_ratio=5"],
        ["algorithm=remax", "generation.group_size=1"],
        ["generation.generation_size=16"],
        [
            "reward.placement=step_deltas",
            "reward.mode=fraction",
        ],
        ["buffer.max_staleness_versions=0"],
        ["weights.push_every_steps=3", "buffer.max_staleness_versions=2"],
        ["generation.engine=hf", "generation.vllm.max_num_seqs=1"],
        ["model.dtype=bfloat16"],
        [
            "weights.transfer=filesystem",
            "launcher=ray",
            "launcher.shared_run_dir=false",
            "weights.transfer.path=s3://bucket/weights",
        ],
        ["learner.ranks=2"],
        [*SHARED_GPU, "weights.transfer=ipc"],
        ["data.filter.above=0.9", "data.filter.below=-0.9"],
        ["num_steps=1"],
        ["launcher=ray", "launcher.address=local", "network.host=127.0.0.1"],
        [
            "launcher=ray",
            "launcher.gpus_per_node=2",
            "learner.ranks=4",
            "learner.gpus_each=1",
            "launcher.shared_run_dir=true",
        ],
        ["launcher=slurm", "network.host=127.0.0.1", 'launcher.extra=["--cpus-per-task=2"]'],
        [*FILES, "data.val_files=/d/b.parquet"],
        [*FILES, "evaluation.every_steps=0"],
    ],
)
def test_a_combination_that_works_is_accepted(overrides: list[str]) -> None:
    compose("ppo_code", overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["verifiers.cores=[0,7]"],
            "verifiers.cores=[0, 7]: this machine does not have 7; name some of 0, 1, 2, 3",
        ),
        (["learner.cores=[1,1]"], "names a core twice"),
        (
            ["generators.count=2", "generators.gpus_each=1", "learner.gpus_each=0.5"],
            "need 2.5 GPUs, this machine has 1",
        ),
    ],
)
def test_what_the_machine_lacks_is_refused(overrides: list[str], expected: str) -> None:
    machine = Machine(cores=(0, 1, 2, 3), num_gpus=1, memory_mb=8000)
    (line,) = machine_problems(compose("ppo_code", overrides), machine)
    assert expected in line


def test_what_this_machine_lacks_a_cluster_may_have() -> None:
    config = compose("ppo_code", ["launcher=ray", "generators.count=2", "generators.gpus_each=1"])
    assert list(machine_problems(config, Machine(cores=(0,), num_gpus=0, memory_mb=8000))) == []


def test_the_default_fits_two_cores_without_gpu() -> None:
    config = compose("ppo_code", ["generators.cores=[0]", "learner.cores=[1]"])
    assert list(machine_problems(config, Machine(cores=(0, 1), num_gpus=0, memory_mb=8000))) == []


def test_one_device_in_turns_needs_nothing_but_the_word() -> None:
    assert compose("ppo_code", ["placement=colocated"]).placement == "colocated"
    shared = [
        "placement=colocated",
        "learner.gpus_each=0.5",
        "generators.gpus_each=0.5",
        "weights.push_every_steps=2",
    ]
    assert (
        compose("ppo_code", [*shared, "buffer.max_staleness_versions=4"]).weights.push_every_steps
        == 2
    )


@pytest.mark.parametrize(
    ("transfer", "parameter", "owners"),
    [
        ("ipc", "path=/elsewhere", "auto, filesystem"),
        ("shared_memory", "path=/elsewhere", "auto, filesystem"),
        ("collective", "path=/elsewhere", "auto, filesystem"),
    ],
)
def test_a_transfer_takes_no_parameter_of_another(
    transfer: str, parameter: str, owners: str
) -> None:
    name = parameter.partition("=")[0]
    expected = f"weights.transfer={transfer} has no {name}, which belongs to {owners}"
    with pytest.raises(ConfigError, match=expected):
        compose("ppo_code", [f"weights.transfer={transfer}", f"weights.transfer.{parameter}"])


@pytest.mark.parametrize("estimator", ["abs", "k2", "k3", "full"])
def test_another_estimate_than_k1_cannot_be_chosen_for_the_reward(estimator: str) -> None:
    for controller in ("fixed", "adaptive"):
        knobs = [f"algorithm.kl.estimator={estimator}", f"algorithm.kl.controller={controller}"]
        with pytest.raises(ConfigError, match=r"algorithm\.kl=reward has no estimator.*kl=loss"):
            compose("ppo_code", ["algorithm.kl=reward", *knobs])
        compose("ppo_code", ["algorithm.kl=loss", *knobs])


def test_k1_cannot_be_chosen_for_the_loss() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.estimator.*abs.*k2.*k3.*full"):
        compose("ppo_code", ["algorithm.kl=loss", "algorithm.kl.estimator=k1"])
