"""Plays scenarios in forks of one process that has imported vLLM, which takes nine seconds of CPU.

Reads lines of JSON, [words of the command, file for its output], and answers each with the exit
code of the fork.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from async_rl.composition.compose import compose
from async_rl.core.os import die_with_parent, leave
from async_rl.generation.environment import prepare_environment


def main() -> None:
    variables = dict(os.environ)
    prepare_environment(compose("grpo_code", ["hardware=cpu"]), [])
    import generation_support  # noqa: F401
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401
    from vllm.v1.worker import cpu_worker  # noqa: F401

    from async_rl.generation.vllm import opening, worker  # noqa: F401

    # Each scenario sets the variables of its own engine.
    os.environ.clear()
    os.environ.update(variables)
    gc.freeze()
    server = os.getpid()
    for line in sys.stdin:
        words, output = json.loads(line)
        child = os.fork()
        if child == 0:
            die_with_parent(server)
            leave(_play(words, Path(output)))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _play(words: list[str], output: Path) -> int:
    with output.open("wb") as file, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except BaseException:  # noqa: BLE001 - it is the output of the scenario
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
