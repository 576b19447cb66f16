"""What TensorBoard shows of a run next to its curves: the configuration and the numbers to
watch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import msgspec

from async_rl.config.base import as_builtins
from async_rl.config.run import RunConfig
from async_rl.monitoring.event_file import EventFile
from async_rl.observability.catalogue import FIRST_SCREEN, with_unit


def describe_run(events: EventFile, config: RunConfig) -> None:
    """Write the first screen, the settings as hyper-parameters, and the configuration as text."""
    settings = as_builtins(config)
    watched = [name for _, names in FIRST_SCREEN for name in names]
    charts = [(with_unit(title, names[0]), names) for title, names in FIRST_SCREEN]
    events.first_screen("The ten numbers to watch", charts)
    shown = sorted(watched, key=lambda name: name != "eval/pass_at_1")
    events.hyper_parameters(dict(_leaves("", settings)), shown)
    # Four spaces are Markdown for text to show as it is.
    text = textwrap.indent(msgspec.yaml.encode(settings).decode(), "    ")
    events.text("run/config", text, 0)
    events.flush()


def _leaves(path: str, value: object) -> Iterator[tuple[str, bool | int | float | str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, bool | int | float | str):
        yield path, value
    else:
        yield path, str(value)
