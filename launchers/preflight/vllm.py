"""The engine arguments and parsers of answers of the installed vLLM, read from its source: an
import would take seconds and hundreds of MB.
"""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_rl.composition.problems import hint
from async_rl.config.generation import PARSERS, THINKING_PARSER, TOOL_PARSER
from async_rl.generation.environment import version_problem

ARGUMENT = "engine argument"
_NAMES = {
    ARGUMENT: ("engine/arg_utils.py", r"^    ([a-z]\w*): "),
    TOOL_PARSER: ("tool_parsers/__init__.py", r'^    "(\w+)": \('),
    THINKING_PARSER: ("reasoning/__init__.py", r'^    "(\w+)": \('),
}
"""By kind: the file, and a line of it with a name: a field of EngineArgs, an entry of a table."""


def installed() -> Path | None:
    """Return the directory of the installed vLLM; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin:
        return Path(spec.origin).parent
    return None


def known_names(root: Path, kind: str) -> list[str]:
    """Return the engine arguments, or the parsers of one of PARSERS, of the vLLM at `root`."""
    file, pattern = _NAMES[kind]
    return re.findall(pattern, (root / file).read_text(), re.MULTILINE)


def vllm_problems(extra: Sequence[str]) -> Iterator[str]:
    """Yield the missing parts of the installed vLLM: a supported version, and the engine arguments
    and the parsers of generation.vllm.extra. Nothing without vLLM.
    """
    root = installed()
    if root is None:
        return
    if problem := version_problem():
        yield problem
    for entry in extra:
        name, _, value = entry.partition("=")
        kind, word = (name, value) if name in PARSERS else (ARGUMENT, name)
        known = known_names(root, kind)
        if word not in known:
            yield (
                f"generation.vllm.extra={entry}: the installed vLLM has no such {kind};"
                f" {hint(word, among=known)}"
            )
