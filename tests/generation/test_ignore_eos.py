"""data.longest=responses: samples end at an end token, or all are written to the limit with the
log-probs of what was drawn.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from composing import compose
from generation_support import END_TOKENS, make_model, weights_of, worst_difference

from async_rl.core.types import Sampling
from async_rl.generation.opener import engine_opener
from async_rl.protocol.generator import Completion
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec

PROMPT = list(range(10, 40))


@pytest.mark.covers("ignore_eos")
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_token_ends_a_sample_unless_it_is_ignored(tmp_path: Path, ignore_eos: bool) -> None:
    model = make_model(tmp_path, is_tied=True)
    weights = weights_of(model, 0)
    sampling = Sampling(temperature=1.0, max_new_tokens=60)

    async def written() -> list[Completion]:
        config = compose(
            "grpo_code",
            ["generation.engine=hf", f"data.longest={'responses' if ignore_eos else 'none'}"],
        )
        engine = await engine_opener(config, tmp_path)()
        try:
            with SharedTensors(
                [tensor_spec(name, tensor) for name, tensor in weights.items()]
            ) as publisher:
                await engine.load_weights(publisher.write(0, weights.values()))
                return [done async for done in engine.generate("r", PROMPT, 16, sampling)]
        finally:
            await engine.close()

    samples = asyncio.run(written())
    inner = [np.isin(sample.token_ids[:-1], END_TOKENS).any() for sample in samples]
    if not ignore_eos:
        assert not any(inner)
        assert {sample.is_truncated for sample in samples} >= {False}
        return
    assert any(inner)
    assert all(sample.is_truncated and len(sample.token_ids) == 60 for sample in samples)
    told = [
        {name: getattr(sample, name).tolist() for name in ("token_ids", "logprobs", "versions")}
        for sample in samples[:4]
    ]
    assert worst_difference(model, {"prompt": PROMPT, "temperature": 1.0, "samples": told}) < 1e-4
