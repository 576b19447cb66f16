"""TensorBoard's event file of a run, written with TensorBoard's own classes and without torch or
TensorFlow.

The only file that imports TensorBoard's writer.
"""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

from async_rl.observability.catalogue import FIRST_SCREEN, describe, with_unit


class EventFile:
    """One run's events, in a file for each start of the run. What `flush` has written survives a
    kill. Raises OSError if it cannot be written.

    Each metric has its meaning from the catalogue with its first value.
    """

    def __init__(self, directory: Path) -> None:
        self._described: set[str] = set()
        directory.mkdir(exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names. Its own writer
        # has a thread, whose error would come as a traceback before the one of the next call.
        path = directory / f"events.out.tfevents.{time.time_ns()}.async-rl"
        self._records = RecordWriter(path.open("xb"))
        self._add(file_version="brain.Event:2")
        self._add(summary=_first_screen())

    def scalar(self, name: str, value: float, step: int) -> None:
        """Add a point of a curve; with the first one, title with unit, and meaning."""
        summary = scalar_pb(name, value)
        # Once per metric: with every point it would double the size of the file.
        if name not in self._described and (spec := describe(name)):
            self._described.add(name)
            metadata = summary.value[0].metadata
            metadata.display_name = with_unit(name, name)
            metadata.summary_description = spec.description
        self._add(step=step, summary=summary)

    def text(self, name: str, markdown: str, step: int) -> None:
        """Add a page of Markdown."""
        self._add(step=step, summary=text_pb(name, markdown))

    def restart(self, step: int) -> None:
        """Continue the run at `step`: TensorBoard discards its earlier values and later steps."""
        # TensorBoard drops later steps only at a START event.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step=step, session_log=start)

    def flush(self) -> None:
        """Let TensorBoard see everything that was added."""
        self._records.flush()

    def close(self) -> None:
        """Flush, and close the file."""
        self._records.close()

    def _add(self, **fields: Any) -> None:
        event = event_pb2.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


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
