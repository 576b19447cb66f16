"""A tensor parallel engine of two workers on a CPU: pushes to both, a worker that is killed during
a push, and the end of a generator that is killed: python tensor_parallel_scenario.py MODEL OUT.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import engine_scenario as play
import msgspec
import psutil
from generation_support import make_model

from async_rl.composition.compose import compose
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.weights.rendezvous import Rendezvous


async def main(path: Path) -> dict[str, Any]:
    overrides = [
        f"model.path={path}",
        "hardware=cpu",
        "data.max_prompt_tokens=100",
        "data.max_response_tokens=250",
        "generation.vllm.max_num_seqs=20",
        "generation.vllm.tensor_parallel_size=2",
    ]
    config = compose("grpo_code", overrides)
    prepare_environment(config, [])
    engine = await engine_opener(config, path)()
    scenario = play.Scenario(engine, make_model(path.with_name("again"), is_tied=True))
    said: dict[str, Any] = {"devices": await engine.weight_devices()}
    await engine.load_weights(scenario.manifest(0))
    await scenario.broadcast(0)
    said["spanning"] = await scenario.spanning()
    said["killed_in_a_push"] = await killed_in_a_push(scenario)
    said["processes"] = [child.pid for child in psutil.Process().children(recursive=True)]
    return said


async def killed_in_a_push(scenario: play.Scenario) -> dict[str, Any]:
    """Kill the second worker while both wait for a broadcast that never comes."""
    engine = scenario.engine
    workers = [
        child
        for child in psutil.Process().children(recursive=True)
        if "Worker_TP" in " ".join([child.name(), *child.cmdline()])
    ]
    manifest = scenario.manifest(play.LAST + 1)
    seat = await scenario.seat(play.LAST + 1)
    # One rank more than will ever come.
    rendezvous = Rendezvous("127.0.0.1")
    rendezvous.open("incomplete")
    seat = msgspec.structs.replace(
        seat,
        communicator="incomplete",
        world_size=seat.world_size + 1,
        timeout_s=120.0,
        store=rendezvous.address,
        secret=rendezvous.secret,
    )
    loading = asyncio.create_task(play.refusal(engine.load_weights(manifest, seat)))
    await asyncio.sleep(1)
    workers[-1].kill()
    killed_s = time.monotonic()
    load = await loading
    return {
        "workers": len(workers),
        "load": load,
        "seconds": time.monotonic() - killed_s,
        "after": await play.refusal(
            play.group(engine, "late", play.prompt(1), 1, play.sampling(max_new_tokens=4))
        ),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
    os.kill(os.getpid(), signal.SIGKILL)
