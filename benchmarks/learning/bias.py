"""The bias of each advantage, aggregation, correction and loss: exact expectations over a bandit.

The bandit has two prompts and three tokens; token 0 is the end token. A response has at most
two tokens, so there are 7 of them, and 210 groups of four. A batch is one group. The benchmark adds
up the gradients of the learner's own functions over all groups, each with its probability under the
policy that sampled it, so the results have no noise. The exact gradient is the gradient of the
expected reward. The bias is the distance to it in units of its length, after the best scaling,
because a learning rate could change the length: the sine of the angle between the two.

Run: `python -m benchmarks.learning.bias` for the figures, `--page` to write the table of
docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.losses import BehaviorWeights, token_weights
from async_rl.algorithms.parts import ALONE, Parts
from async_rl.batching.batch import Batch, Calls
from async_rl.batching.packing import Pass
from async_rl.composition.compose import compose_unchecked
from async_rl.composition.overrides import with_defaults
from async_rl.config.algorithm import SumAggregation
from async_rl.config.policy_losses import BehaviorCorrection
from async_rl.config.run import RunConfig
from async_rl.core.heads import SampleHead
from async_rl.learner.models import PolicyOutput, Values
from async_rl.learner.objective import compute_targets
from async_rl.learner.objective_state import Moments
from async_rl.learner.pass_loss import correction, policy_pass_loss
from benchmarks.figures import figure

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- bias: begin -->\n", "<!-- bias: end -->\n"
GROUP_SIZE = 4
RESPONSES = ((0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2))
"""Token 0 is the end token; a response of two tokens is complete in any case."""
# An easy prompt and a hard one, each with half marks: with rewards of 0 and 1 at one prompt, the
# division by the standard deviation would only scale the gradient.
REWARDS = ((1.0, 1.0, 0.5, 1.0, 0.0, 1.0, 0.5), (0.0, 0.0, 0.5, 0.0, 0.0, 1.0, 0.0))
# Values of the first and the second token. Any do: a wrong critic must not add a bias.
VALUES = (0.7, 0.2)
# Distance of the old weights. The effective sample size of sequences is then 0.76; token weights
# are between 0.4 and 2.1.
OLD = 0.45
UNBIASED = (
    "algorithm.advantage=rloo",
    "algorithm.aggregation=sequence_sum",
    "algorithm.policy_loss.correction=none",
)
"""Choices without a bias on fresh data, so that a row shows the bias of one choice only."""


_REINFORCE = "algorithm.policy_loss=reinforce"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table: a choice, the settings that select it, and the columns that it concerns.

    fresh: data of the current weights; old: data of older weights, at the first update of the
    batch; later: fresh data, at a later update of the batch.
    """

    name: str
    settings: tuple[str, ...]
    columns: tuple[str, ...] = ("fresh", "old", "later")


def _all(*settings: str) -> tuple[str, ...]:
    """The settings of a row, and those without a bias for all that it does not name."""
    return tuple(with_defaults(settings, UNBIASED))


def _advantage(name: str, *settings: str) -> Row:
    kind = f"algorithm.advantage={name}"
    label = " ".join([f"`{kind}`", *(f"`{s}`" for s in settings)])
    return Row(name=label, settings=_all(_REINFORCE, kind, *settings), columns=("fresh",))


def _aggregation(name: str) -> Row:
    chosen = f"algorithm.aggregation={name}"
    return Row(name=f"`{chosen}`", settings=_all(chosen), columns=("fresh",))


def _correction(name: str, *settings: str) -> Row:
    kind = f"algorithm.policy_loss.correction={name}"
    bounds = [f"algorithm.policy_loss.correction.{s}" for s in settings]
    label = " ".join([f"`{kind}`", *(f"`{s}`" for s in settings)])
    return Row(name=label, settings=_all(kind, *bounds), columns=("old",))


def _loss(name: str, *settings: str) -> Row:
    kind = f"algorithm.policy_loss={name}"
    parameters = [f"algorithm.policy_loss.{s}" for s in settings]
    label = " ".join([f"`{kind}`", *(f"`{s}`" for s in settings)])
    return Row(name=label, settings=(*UNBIASED[:2], kind, *parameters))


def _example(fn: str) -> Row:
    """The row of a plug-in in async_rl/examples/losses/, by its name."""
    module, _, function = fn.partition(":")
    choice, columns = {
        "loss": ("policy_loss", ("fresh", "old", "later")),
        "advantages": ("advantage", ("fresh",)),
        "weights": ("policy_loss.correction", ("old",)),
    }[function]
    settings = [
        f"algorithm.{choice}=plugin",
        f"algorithm.{choice}.fn=async_rl.examples.losses.{module}:{function}",
    ]
    if function == "loss":
        # As for the other losses: with its default correction.
        return Row(name=f"`{fn}`", settings=(*UNBIASED[:2], *settings), columns=columns)
    loss = [_REINFORCE] if function == "advantages" else []
    return Row(name=f"`{fn}`", settings=_all(*loss, *settings), columns=columns)


ROWS = (
    _advantage("rloo"),
    _advantage("dr_grpo"),
    _advantage("grpo"),
    _advantage("remax"),
    _advantage("reinforce_plus_plus"),
    _advantage("reinforce_plus_plus", "algorithm.normalize_advantages=batch"),
    _advantage("reinforce_plus_plus_baseline"),
    _advantage("gae"),
    _advantage("vtrace"),
    _aggregation("sequence_sum"),
    _aggregation("token_mean"),
    _aggregation("sequence_mean"),
    _correction("none"),
    _correction("token_tis"),
    _correction("token_mis"),
    _correction("sequence_tis"),
    _correction("sequence_tis", "max=8.0"),
    _correction("sequence_mis"),
    _loss("ppo"),
    _loss("ppo_vanilla"),
    _loss("gspo"),
    _loss("cispo"),
    _loss("reinforce"),
    _loss("dppo"),
    _loss("vespo"),
    _example("sapo:loss"),
    _example("oapl:loss"),
    _example("oapl:advantages"),
    _example("m2po:weights"),
    _example("geometric:weights"),
)


class Policy:
    """A softmax over three tokens, given the prompt and the token before."""

    def __init__(self, parameters: Tensor) -> None:
        """parameters: float64 [5, 3]; three rows by the token before, two by the prompt."""
        self.parameters = parameters

    def logprobs(self, prompt: int, response: Sequence[int]) -> Tensor:
        """Return the log-prob of each token of a response: float64 [L]."""
        before = (0, *response[:-1])
        logits = self.parameters[list(before)] + self.parameters[3 + prompt]
        table = torch.log_softmax(logits, -1)
        return table[range(len(response)), list(response)]

    def expected_reward(self) -> Tensor:
        """Return the mean reward over both prompts and all responses."""
        total = torch.zeros((), dtype=torch.float64)
        for prompt, rewards in enumerate(REWARDS):
            for response, reward in zip(RESPONSES, rewards, strict=True):
                total = total + reward * self.logprobs(prompt, response).sum().exp()
        return total / len(REWARDS)


def _parameters() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(5, 3, dtype=torch.float64, generator=generator)


def _moved(distance: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    step = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    return _parameters() + distance * step


class Bandit:
    """All groups of both prompts, as one batch; each group is weighted separately."""

    def __init__(self) -> None:
        multisets = list(itertools.combinations_with_replacement(range(len(RESPONSES)), GROUP_SIZE))
        self.members = [(prompt, group) for prompt in range(len(REWARDS)) for group in multisets]
        flat = [(prompt, number) for prompt, group in self.members for number in group]
        self.sequences = flat
        self.lengths = [len(RESPONSES[number]) for _, number in flat]
        starts = list(itertools.accumulate(self.lengths, initial=0))[:-1]
        self.starts = dict(enumerate(starts))
        self.index = torch.repeat_interleave(torch.arange(len(flat)), torch.tensor(self.lengths))
        self.groups = torch.arange(len(self.members)).repeat_interleave(GROUP_SIZE)

    def tokens(self, policy: Policy) -> Tensor:
        """Return the log-probs of all tokens of all groups: float64 [R]."""
        table = {
            (prompt, number): policy.logprobs(prompt, response)
            for prompt in range(len(REWARDS))
            for number, response in enumerate(RESPONSES)
        }
        return torch.cat([table[sequence] for sequence in self.sequences])

    def batch(self, behavior: Policy) -> Batch:
        """Return the groups as a batch that this policy sampled."""
        num_sequences = len(self.sequences)
        baselines = [
            SampleHead(
                prompt_length=1,
                response_length=1,
                is_truncated=False,
                reward=REWARDS[prompt][0],
                parts={},
                steps=(),
                calls=(),
            )
            for prompt, _ in self.members
        ]
        every = torch.arange(num_sequences)
        calls = Calls(
            sequence=every,
            part=every,
            rewards=torch.zeros(num_sequences).double(),
            part_sequence=every,
            part_group=self.groups,
            num_groups=len(self.members),
            of_tokens=self.index,
        )
        return Batch(
            prompt_key=[prompt for prompt, _ in self.sequences],
            prompt_lengths=[1] * num_sequences,
            response_lengths=self.lengths,
            owners=[0] * num_sequences,
            trajectories={},
            offsets=self.starts,
            num_groups=len(self.members),
            group_index=self.groups,
            rewards=torch.tensor([REWARDS[p][n] for p, n in self.sequences]).double(),
            is_truncated=torch.zeros(num_sequences, dtype=torch.bool),
            sequence_index=self.index,
            loss_mask=torch.ones(len(self.index), dtype=torch.bool),
            behavior_logprobs=self.tokens(behavior).detach(),
            versions=torch.zeros(len(self.index), dtype=torch.int64),
            steps=[],
            calls=calls,
            baselines=baselines,
            across=ALONE,
            edits=None,
            is_outside=torch.zeros(len(self.index), dtype=torch.bool),
        )

    def probabilities(self, behavior: Policy) -> Tensor:
        """Return the probability of each group, in any order of its members: float64 [groups]."""
        result = []
        for prompt, group in self.members:
            ways = math.factorial(GROUP_SIZE)
            logprob = 0.0
            for number, times in Counter(group).items():
                ways //= math.factorial(times)
                logprob += times * behavior.logprobs(prompt, RESPONSES[number]).sum().item()
            result.append(ways * math.exp(logprob) / len(REWARDS))
        return torch.tensor(result, dtype=torch.float64)


def gradient(
    config: RunConfig, bandit: Bandit, *, behavior: Policy, proximal: Policy, policy: Policy
) -> Tensor:
    """Return the expected gradient of the learner's loss over all groups: float64 [5, 3]."""
    algorithm, batch = config.algorithm, bandit.batch(behavior)
    values = torch.cat([torch.tensor(VALUES[:length]).double() for length in bandit.lengths])
    before = PolicyOutput(
        logprobs=bandit.tokens(proximal).detach(),
        entropies=torch.zeros_like(batch.behavior_logprobs),
        ref_logprobs=None,
        kl=None,
        values=Values(values, torch.zeros(batch.num_sequences, dtype=torch.float64)),
    )
    # A batch is one group, so a value normalised over the batch is normalised over each group.
    if algorithm.normalize_advantages == "batch":
        algorithm = algorithm.model_copy(update={"normalize_advantages": "group"})
    targets = compute_targets(
        batch,
        batch.loss_mask,
        before,
        config=config.model_copy(update={"algorithm": algorithm}),
        kl_coef=0.0,
        moments=Moments(),
    )
    logprobs = bandit.tokens(policy)
    output = PolicyOutput(logprobs, before.entropies, None, None, None)
    loss, _ = policy_pass_loss(
        algorithm,
        batch,
        _everything(len(bandit.index)),
        output,
        weights=_weights(config, batch, bandit.probabilities(behavior)),
        before=before,
        targets=targets,
        corrected=_corrected(algorithm.policy_loss.correction, batch, before),
        kl_coef=0.0,
    )
    return torch.autograd.grad(-loss, policy.parameters)[0]


def _corrected(settings: BehaviorCorrection, batch: Batch, before: PolicyOutput) -> BehaviorWeights:
    """The behavior weights: each group is a batch of its own, on which a plug-in may depend."""
    log_ratio = before.logprobs - batch.behavior_logprobs
    if settings.kind != "plugin":
        sequences = Parts(
            index=batch.sequence_index, count=batch.num_sequences, mask=batch.loss_mask
        )
        return correction(settings, log_ratio, sequences=sequences)
    sizes = torch.bincount(batch.group_index[batch.sequence_index]).tolist()
    found = []
    for own, index in zip(log_ratio.split(sizes), batch.sequence_index.split(sizes), strict=True):
        mask = torch.ones_like(index, dtype=torch.bool)
        group = Parts(index=index - index[0], count=GROUP_SIZE, mask=mask)
        found.append(correction(settings, own, sequences=group))
    return BehaviorWeights(*(torch.cat(x) for x in zip(*found, strict=True)))


def _weights(config: RunConfig, batch: Batch, probabilities: Tensor) -> Tensor:
    """The weight of each token within its group's batch, times the probability of the group."""
    aggregation = config.algorithm.aggregation
    constant = 2 if isinstance(aggregation, SumAggregation) else None
    group_of_token = batch.group_index[batch.sequence_index]
    sizes = torch.bincount(group_of_token).tolist()
    weights = []
    # The weights of a batch follow from the lengths of its responses alone.
    known: dict[tuple[int, ...], Tensor] = {}
    for group, index in enumerate(batch.sequence_index.split(sizes)):
        own = index - group * GROUP_SIZE
        owners = tuple(own.tolist())
        if owners not in known:
            parts = Parts(index=own, count=GROUP_SIZE, mask=torch.ones_like(own, dtype=torch.bool))
            shares = token_weights(parts, aggregation=aggregation.kind, constant_tokens=constant)
            known[owners] = shares.double()
        weights.append(known[owners] * probabilities[group])
    return torch.cat(weights)


def _everything(num_tokens: int) -> Pass:
    """A pass of all tokens; the loss reads only their numbers."""
    index, nothing = torch.arange(num_tokens), torch.zeros(0, dtype=torch.int64)
    return Pass(
        input_ids=nothing,
        position_ids=nothing,
        predict_index=nothing,
        target_ids=nothing,
        token_index=index,
        last_index=nothing,
        sequences=nothing,
        segments=np.empty((0, 3), dtype=np.int64),
    )


def bias(actual: Tensor, exact: Tensor) -> float:
    """Return the distance to the exact gradient after the best scaling, in units of its length."""
    scale = max(0.0, ((actual * exact).sum() / actual.square().sum()).item())
    return ((scale * actual - exact).norm() / exact.norm()).item()


def effective_sample_size() -> float:
    """Return the effective sample size of the sequence weights of the old data, as a share."""
    new, old, mean, square = Policy(_parameters()), Policy(_moved(OLD, 5)), 0.0, 0.0
    for prompt, response in itertools.product(range(len(REWARDS)), RESPONSES):
        before = old.logprobs(prompt, response).sum().exp().item()
        weight = new.logprobs(prompt, response).sum().exp().item() / before
        mean += before * weight / len(REWARDS)
        square += before * weight**2 / len(REWARDS)
    return mean**2 / square


def table() -> dict[str, dict[str, float]]:
    """Return the bias of each row in each of its columns."""
    bandit, result = Bandit(), {}
    for row in ROWS:
        config = compose_unchecked("grpo_code", row.settings)
        result[row.name] = {column: _cell(config, bandit, column) for column in row.columns}
    return result


def _cell(config: RunConfig, bandit: Bandit, column: str) -> float:
    policy = Policy(_parameters().requires_grad_())
    old = Policy(_moved(OLD, 5))
    behavior = policy if column == "fresh" else old
    proximal = old if column == "later" else policy
    (exact,) = torch.autograd.grad(policy.expected_reward(), policy.parameters)
    actual = gradient(config, bandit, behavior=behavior, proximal=proximal, policy=policy)
    return bias(actual, exact)


def page(biases: dict[str, dict[str, float]]) -> str:
    """Return the table of docs/algorithms.md."""
    columns = ("fresh", "old", "later")
    lines = ["| choice | fresh data | old data | later update |", "|---|---|---|---|"]
    for name, cells in biases.items():
        shown = (f"{cells[c]:.1%}" if c in cells else "" for c in columns)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def written(text: str, content: str) -> str:
    """Return the page with the table between its marks replaced."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + content + END + rest.partition(END)[2]


def main() -> None:
    """Print the figures, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true")
    biases = table()
    if parser.parse_args().page:
        PAGE.write_text(written(PAGE.read_text(), page(biases)))
        return
    for name, cells in biases.items():
        for column, value in cells.items():
            figure(f"bias of {name.replace('`', '')}, {column}", value, "share")


if __name__ == "__main__":
    main()
