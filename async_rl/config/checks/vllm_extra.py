"""`generation.vllm.extra`: further arguments of vLLM's engine, checked without importing vllm.

vllm_extra.toml has the arguments that are refused.
Invariant: an argument is passed on only if the project does not set it and if pushes, labels and
log-probs stay what generation/engine.py promises. An argument that changes how the engine computes
(quantization, dtype of the KV cache, attention backend) is passed on: the probe after a push and
`mismatch/engine_abs_mean` measure it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from async_rl.core.records import read_packaged

_TABLES = read_packaged(__package__, "vllm_extra.toml", dict[str, dict[str, Any]])


def extra_problems(
    entries: Sequence[str], *, is_eager: bool = False, is_gpu: bool = False
) -> Iterator[str]:
    """Yield a line for each entry that cannot be passed on. Names that the installed vLLM does not
    have are found where vLLM is (generation/vllm/installed.py).

    is_eager: generation.vllm.enforce_eager; is_gpu: generators have GPUs.
    """
    settings, refused, prefixes, cpu = _TABLES.values()
    given: set[str] = set()
    for entry in entries:
        name, _, value = entry.partition("=")
        path = f"generation.vllm.extra={entry}"
        prefix = next((start for start in prefixes if name.startswith(start)), "")
        if name in given:
            yield f"{path}: {name} is given twice; give it once"
        elif name in settings:
            yield f"{path}: the project sets {name}; set {settings[name]}"
        elif name in refused or prefix:
            reason = refused.get(name) or prefixes[prefix]
            yield f"{path}: {reason}; remove it"
        elif name == "speculative_config" and (is_gpu or '"ngram"' not in entry):
            # A draft model would need separate pushes.
            yield f"{path}: log-probs are checked for drafts by ngram on a CPU only; remove it"
        elif not is_gpu and value not in cpu.get(name, [value]):
            yield f"{path}: vLLM on a CPU would be wrong; set one of {', '.join(cpu[name])}"
        elif is_eager and name == "compilation_config":
            # vLLM would replace it without an error.
            eager = "generation.vllm.enforce_eager"
            yield f"{path}: {eager}=true compiles nothing; set {eager}=false, or remove the entry"
        given.add(name)
