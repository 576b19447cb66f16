"""The certificate of a world."""

from __future__ import annotations

import parts
from world import World

from async_rl.composition.compose import write_config
from async_rl.config.base import replace
from async_rl.core.types import Purpose
from async_rl.data.prompt_file import PROMPTS_FILE
from async_rl.data.prompts import write_prompts
from async_rl.runs.certificate.certify import certify
from async_rl.runs.certificate.statements import Certificate

PROBED = {"weights.probe_every_pushes": 10}
"""A certificate needs the probes, which the worlds of other tests leave out."""


def certified(world: World, *, order: int | None = None) -> Certificate:
    """Certify a world that was played; its prompts and settings are where a run has them. order:
    the seed that they say; None: the seed of the world, which orders its prompts.
    """
    settings = world.run_dir / "config.yaml"
    settings.unlink(missing_ok=True)
    seed = world.seed if order is None else order
    write_config(replace(world.config, seed=seed), settings)
    prompts = parts.Prompts(seed)
    rows = {Purpose.TRAIN: prompts.rows, Purpose.EVAL: prompts.held_out}
    write_prompts(world.run_dir / PROMPTS_FILE, "", rows)
    return certify(world.run_dir)


def broken(certificate: Certificate) -> dict[str, str]:
    """The promises that do not hold, each with the sentences that say why."""
    return {each.promise: "\n".join(each.evidence) for each in certificate.broken}
