"""Best-of-n: which of the samples drawn for a prompt are kept as its group.

Pure. The buffer asks for `num_drawn`; the generator keeps the `best_of` them once all are scored.
"""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.config_generation import GenerationConfig
from async_rl.types import Trajectory


def num_drawn(generation: GenerationConfig) -> int:
    """Samples drawn for a training prompt, of which generation.group_size are kept."""
    return generation.generation_size or generation.group_size


def best_of(samples: Sequence[Trajectory], *, count: int) -> list[Trajectory]:
    """The `count` samples of the highest reward, of equal ones the longest, in the order in which they were drawn."""
    ranked = sorted(range(len(samples)), key=lambda i: (-samples[i].score.reward, -samples[i].response_length, i))
    return [samples[i] for i in sorted(ranked[:count])]
