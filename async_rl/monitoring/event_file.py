"""TensorBoard's event file of a run, written with TensorBoard's own classes and without torch or
TensorFlow.

The only file that imports TensorBoard's writer.
"""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from async_rl.observability.catalogue import FIRST_SCREEN, describe, with_unit

_FLUSH_S = 2
_MAX_QUEUED = 1000


class EventFile:
    """One run's events. A background thread writes them and flushes every two seconds, so that a
    killed run loses no more.

    Each metric has its meaning from the catalogue with its first value.
    """

    def __init__(self, directory: Path) -> None:
        self._described: set[str] = set()
        threading.excepthook = _hide_what_is_raised_again(threading.excepthook)
        # The name of the file has the time in seconds and a number that grows.
        self._writer = EventFileWriter(
            str(directory), max_queue_size=_MAX_QUEUED, flush_secs=_FLUSH_S
        )
        self._add(_first_screen(), 0)

    def scalar(self, name: str, value: float, step: int) -> None:
        """Add a point of a curve; with the first one, title with unit, and meaning."""
        summary = scalar_pb(name, value)
        # Once per metric: with every point it would double the size of the file.
        if name not in self._described and (spec := describe(name)):
            self._described.add(name)
            metadata = summary.value[0].metadata
            metadata.display_name = with_unit(name, name)
            metadata.summary_description = spec.description
        self._add(summary, step)

    def text(self, name: str, markdown: str, step: int) -> None:
        """Add a page of Markdown, which a person sees before the next periodic flush."""
        self._add(text_pb(name, markdown), step)
        self._writer.flush()

    def restart(self, step: int) -> None:
        """Continue the run at `step`: TensorBoard discards its earlier values and later steps."""
        # TensorBoard drops later steps only at a START event.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, session_log=start))
        self._writer.flush()

    def close(self) -> None:
        """Flush, and stop the background thread."""
        self._writer.close()

    def _add(self, summary: summary_pb2.Summary, step: int) -> None:
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))


def _hide_what_is_raised_again(
    elsewhere: Callable[[threading.ExceptHookArgs], object],
) -> Callable[[threading.ExceptHookArgs], None]:
    """Return a handler of the errors of threads that gives all but the writer's to another one."""

    def handle(args: threading.ExceptHookArgs) -> None:
        # The writer's thread keeps its error, and the next call of the writer raises it again, so a
        # full disk ends the run with one sentence. The traceback of the thread would come before.
        if type(args.thread).__module__ != EventFileWriter.__module__:
            elsewhere(args)

    return handle


def _first_screen() -> summary_pb2.Summary:
    """Return the layout of the custom-scalars page: the ten numbers to watch."""
    layout = layout_pb2.Layout()
    category = layout.category.add(title="The ten numbers to watch")
    for title, chart in FIRST_SCREEN.items():
        # TensorBoard takes names for patterns: eval/pass_at_1 would also match
        # eval/pass_at_1_error.
        patterns = [f"^{re.escape(name)}$" for name in chart.metrics]
        category.chart.add(title=with_unit(title, chart.metrics[0]), multiline={"tag": patterns})
    summary = summary_pb2.Summary()
    summary.value.add(
        tag=custom_scalar_metadata.CONFIG_SUMMARY_TAG,
        metadata=custom_scalar_metadata.create_summary_metadata(),
        tensor=tensor_util.make_tensor_proto(layout.SerializeToString(), dtype=np.object_),
    )
    return summary
