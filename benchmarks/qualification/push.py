"""A push over NCCL while other work fills the GPU's default stream."""

from __future__ import annotations

from pathlib import Path

from benchmarks.weights.push_gpu import Bench, Numbers


def beside_work(scratch: Path, settings: list[str]) -> Numbers:
    """Compare a push of 3.4 GB, and work of two seconds, alone and next to each other."""
    bench = Bench(is_tiny=False, layers=0, scratch=scratch)
    numbers = bench.push_beside_products()
    push_s, work_s = (numbers[f"own_stream_{of}_s"] for of in ("push_alone", "work_beside_push"))
    return {
        **numbers,
        "push_times_alone": numbers["own_stream_push_beside_work_s"] / push_s,
        "work_times_alone": work_s / numbers["work_alone_s"],
    }
