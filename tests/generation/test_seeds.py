"""Random numbers of the transformers engine: for each request, and the same in each attempt."""

from __future__ import annotations

from async_rl.generation.hf.decoding import seed_of


def test_a_seed_depends_on_group_sample_and_turn_and_not_on_the_attempt() -> None:
    names = [
        "7.1.0",
        "7.1.1",
        "8.1.0",
        "7.1.0.1",
        "7.1.0/0.0.gateway-0",
        "7.1.0/1.0.gateway-0",
        "7.1.1/0.0.gateway-0",
    ]
    seeds = [seed_of(name, 3) for name in names]
    assert len(set(seeds)) == len(names)
    assert [seed_of(name.replace(".1.", ".2.", 1), 3) for name in names] == seeds
    assert seed_of("7.1.0", 4) not in seeds
