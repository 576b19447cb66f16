"""Plays scenarios in forks of one process that has imported vLLM, which takes nine seconds of CPU.

Reads lines with a folder, whose file `request` names a function and has its arguments; the fork
writes `answer` and `output` there. Answers each line with the exit code of the fork.
"""

import asyncio
import gc
import importlib
import inspect
import os
import signal
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
        child = os.fork()
        if child == 0:
            die_with_parent(server)
            leave(_play(Path(line.rstrip("\n"))))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _play(folder: Path) -> int:
    with (folder / "output").open("wb") as file, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from generation_support import decode, encode

    try:
        name, arguments, code = decode((folder / "request").read_bytes())
        module, _, function = name.partition(":")
        answer = getattr(importlib.import_module(module), function)(*arguments)
        if inspect.iscoroutine(answer):
            answer = asyncio.run(answer)
        (folder / "answer").write_bytes(encode(answer))
    except BaseException:  # noqa: BLE001 - it is the output of the scenario
        traceback.print_exc()
        return 1
    if code:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    main()
