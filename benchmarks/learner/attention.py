"""Compare attention by parts with attention under dense masks: time of a step, memory by tokens.

The dense form pads segments of similar length to blocks; a response that shares its prompt has a
float32 mask of its tokens by prompt and response. The steps of
`benchmarks.learner.learner` run on its embedded batch and on a batch of long responses, in one
process in alternating phases.

Memory: the peak above the inputs of one layer's attention, forward and backward, each case in a
separate process. The row has a prompt of a quarter of the tokens and two responses that share it,
and a whole sequence. Above 16k tokens only the parts are measured.

Run: `OMP_NUM_THREADS=1 python -m benchmarks.learner.attention [--rounds N] [--tokens N --form
parts]`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from async_rl.batching.packing import Indices, seen_by
from async_rl.learner import models
from async_rl.learner.attention import plan
from benchmarks.figures import figure
from benchmarks.learner.learner import batches, framework_step, make_groups, random_model, status_mb

HEADS, WIDTH = 6, 32
_MIN_FILL = 0.6
ROUNDS = 5


class DensePlan:
    """Blocks of segments, sorted by length, under a mask where a prompt is shared."""

    def __init__(self, segments: Indices, device: torch.device) -> None:
        # Start, length, start and length of the prompt.
        sizes = zip(seen_by(segments), segments[:, 1], strict=True)
        prompts = [(tokens[0], len(tokens) - length) for tokens, length in sizes]
        segments = np.column_stack([segments[:, :2], prompts])
        order = np.lexsort((-segments[:, 1], segments[:, 3] > 0))
        self._blocks: list[tuple[Tensor, Tensor, Tensor | None, int]] = []
        output = np.empty(int(segments[:, 1].sum()), dtype=np.int64)
        segments, first, written = segments[order], 0, 0
        while first < len(segments):
            rest = segments[first:]
            fits = (rest[:, 1] >= _MIN_FILL * rest[0, 1]) & ((rest[:, 3] > 0) == (rest[0, 3] > 0))
            size = len(fits) if fits.all() else int(fits.argmin())
            members = rest[:size]
            own, is_real = _padded([np.arange(s, s + n) for s, n, _, _ in members])
            output[own[is_real]] = written + np.flatnonzero(is_real)
            self._blocks.append(self._block(own, members))
            first += size
            written += own.size
        self._output = torch.from_numpy(output)

    @staticmethod
    def _block(own: Indices, members: Indices) -> tuple[Tensor, Tensor, Tensor | None, int]:
        num, length = own.shape
        prefix, mask = int(members[:, 3].max()), None
        keys = own
        if prefix:
            is_prefix = np.arange(prefix) < members[:, 3, None]
            prompt = np.where(is_prefix, members[:, 2, None] + np.arange(prefix), own[:, :1])
            keys = np.concatenate([prompt, own], 1)
            is_seen = np.empty((num, length, prefix + length), dtype=bool)
            is_seen[:, :, :prefix] = is_prefix[:, None]
            is_seen[:, :, prefix:] = np.tri(length, dtype=bool)
            mask = torch.from_numpy(np.where(is_seen, np.float32(0), np.float32(-np.inf))[:, None])
        index = (torch.from_numpy(x.reshape(-1)) for x in (own, keys))
        return *index, mask, num

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, _: int | None
    ) -> Tensor:
        """Compute `Plan.attend` without a window."""
        outputs = []
        for queries, keys, mask, num in self._blocks:
            q, k, v = (
                x.flatten(1).index_select(0, index).view(num, -1, *x.shape[1:]).transpose(1, 2)
                for x, index in ((query, queries), (key, keys), (value, keys))
            )
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
            outputs.append(out.transpose(1, 2).reshape(len(queries), -1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self._output).view(query.shape)


def _padded(rows: list[Indices]) -> tuple[Indices, np.ndarray]:
    """Return int64 [N, L] and the cells that are no padding, bool [N, L]. Padding repeats the row's
    first token.
    """
    lengths = np.array([len(row) for row in rows])
    is_real = np.arange(lengths.max()) < lengths[:, None]
    index = np.repeat(np.array([row[0] for row in rows])[:, None], lengths.max(), 1)
    index[is_real] = np.concatenate(rows)
    return index, is_real


FORMS = {"dense": DensePlan, "parts": plan}


def compare_steps(name: str, step: Callable[[], None], rounds: int) -> None:
    """Print the CPU seconds of a step with each form."""
    spent: dict[str, list[float]] = {form: [] for form in FORMS}
    for round_number in range(rounds + 1):
        for form, make in FORMS.items():
            with mock.patch.object(models, "plan", make):
                started_s = time.process_time()
                step()
            if round_number:
                spent[form].append(time.process_time() - started_s)
    for form, values in spent.items():
        figure(f"{name}: {form}", median(values), f"CPU s per step (best {min(values):.3f})")
    ratio = median(spent["dense"]) / median(spent["parts"])
    figure(f"{name}: speed of parts against dense", ratio, "x", goal=">= 1")


def peak_mb(form: str, tokens: int) -> float:
    """Return the peak memory of attention above its inputs and gradients, in MB."""
    part = tokens // 4
    shared = [(part, part, part - 1), (2 * part, part, part - 1)]
    segments = np.array([(0, part, -1), *shared, (3 * part, part, -1)])
    given = [torch.randn(tokens, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
    for x in given:
        x.grad = torch.zeros_like(x)
    pull = torch.ones_like(given[0])
    # Loads the kernels.
    F.scaled_dot_product_attention(*(torch.ones(1, 1, 2, 4, requires_grad=True),) * 3).sum()
    Path("/proc/self/clear_refs").write_text("5")  # resets the recorded peak
    before_mb = status_mb("VmRSS")
    row = FORMS[form](segments, torch.device("cpu"))
    query, key, value = given
    row.attend(query, key, value, None, None).backward(pull)
    return status_mb("VmHWM") - before_mb


def memory() -> None:
    """Print the peak of each form by tokens."""
    for tokens in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        for form in FORMS:
            if form == "dense" and tokens > 16384:
                continue
            command = [sys.executable, "-m", "benchmarks.learner.attention", "--form", form]
            command += ["--tokens", str(tokens)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peak = float(done.stdout.split()[-1])
            figure(f"{tokens} tokens, {form}: peak", peak, "MB")
            figure(f"{tokens} tokens, {form}: per token", peak * 2**10 / tokens, "KB")


def main() -> None:
    """Measure steps and memory, or one case of the memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--form", choices=list(FORMS))
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.form:
        print(peak_mb(arguments.form, arguments.tokens))
        return
    rng = np.random.default_rng(0)
    prompts = [x for _ in range(4) for x in [rng.integers(0, 600, 400).tolist()] * 8]
    groups = {
        "embedded": batches()["embedded"],
        "long": make_groups(prompts, rng.integers(300, 600, len(prompts)).tolist()),
    }
    with tempfile.TemporaryDirectory() as scratch:
        model_path = random_model(Path(scratch))
        for name, batch in groups.items():
            step = framework_step("grpo_code", ["learner.budget_tokens=8192"], model_path, batch)
            compare_steps(name, step, arguments.rounds)
    memory()


if __name__ == "__main__":
    main()
