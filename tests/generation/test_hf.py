"""The samples of the transformers engine: their random numbers, for each request and the same in
each attempt, and end tokens that do not end them.
"""

from pathlib import Path

import numpy as np
import pytest
from composing import compose
from generation_support import END_TOKENS, make_model, model_of, weights_of, worst_difference

from async_rl.core.types import Sampling
from async_rl.generation.engine import seed_of
from async_rl.generation.opener import engine_opener
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec


def test_a_seed_depends_on_group_sample_and_turn_and_not_on_the_attempt() -> None:
    names = ["7.1.0", "7.1.1", "8.1.0", "7.1.0.1"]
    names += [f"7.1.{sample}.gateway-0" for sample in ("0/0.0", "0/1.0", "1/0.0")]
    seeds = [seed_of(name, 3) for name in names]
    assert len(set(seeds)) == len(names)
    assert [seed_of(name.replace(".1.", ".2.", 1), 3) for name in names] == seeds
    assert seed_of("7.1.0", 4) not in seeds


@pytest.mark.covers("ignore_eos")
async def test_an_end_token_that_is_ignored_ends_no_sample(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    weights = weights_of(model, 0)
    sampling = Sampling(temperature=1.0, max_new_tokens=60)
    prompt = list(range(10, 40))
    config = compose("grpo_code", ["generation.engine=hf", "data.longest=responses"])
    engine = await engine_opener(config, tmp_path)()
    with SharedTensors([tensor_spec(name, it) for name, it in weights.items()]) as publisher:
        await engine.load_weights(publisher.write(0, weights.values()))
        samples = [done async for done in engine.generate("r", prompt, 8, sampling)]
    await engine.close()
    assert any(np.isin(sample.token_ids[:-1], END_TOKENS).any() for sample in samples)
    assert all(sample.is_truncated and len(sample.token_ids) == 60 for sample in samples)
    group = {"prompt": prompt, "temperature": 1.0, "samples": samples[:2]}
    assert worst_difference(lambda version: model_of(model, version), group) < 1e-4
