"""TensorBoard's event file of a run, written with TensorBoard's own classes and without torch or
TensorFlow.

The only file that imports TensorBoard's writer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar_metadata
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from async_rl.observability.catalogue import describe, with_unit

_FIRST_COLUMNS = (
    "algorithm.advantage.kind",
    "generation.group_size",
    "learner.optimizer.lr",
    "num_steps",
    "run_name",
)
_FLUSH_S = 2
_MAX_QUEUED = 1000
_BUCKETS = 30
_ROTATE_BYTES = 64 * 2**20
"""The size at which the next event file starts. TensorBoard reads the files of a directory in
order, and old ones can be moved away while the run writes.
"""


class EventFile:
    """One run's events, in files of limited size. A background thread writes them and flushes every
    two seconds, so that a killed run loses no more.

    Each metric has its meaning from the catalogue with its first value.
    """

    def __init__(self, directory: Path) -> None:
        self._described: set[str] = set()
        self._directory = directory
        self._size_bytes = 0
        self._writer = self._begin()

    def _begin(self) -> EventFileWriter:
        """Begin a file. Its name has the time in seconds and a number that grows."""
        return EventFileWriter(
            str(self._directory), max_queue_size=_MAX_QUEUED, flush_secs=_FLUSH_S
        )

    def scalar(self, name: str, value: float, step: int) -> None:
        """One point of a curve."""
        self._add(self._described_once(name, scalar_pb(name, value)), step)

    def histogram(self, name: str, values: Sequence[float], step: int) -> None:
        """A distribution at one step; values may be empty."""
        # float64 holds every counter and version exactly.
        data = np.asarray(values, dtype=np.float64)
        self._add(self._described_once(name, histogram_pb(name, data, buckets=_BUCKETS)), step)

    def text(self, name: str, markdown: str, step: int) -> None:
        """A page of Markdown."""
        self._add(text_pb(name, markdown), step)

    def hyper_parameters(
        self, settings: Mapping[str, bool | int | float | str], metrics: Sequence[str]
    ) -> None:
        """The settings of the run, for TensorBoard's table of runs, and the scalars that stand
        next to them, of which it shows the first.
        """
        # No domains: TensorBoard takes those of one run for all, and would hide the other runs.
        columns = [hparams.HParam(name) for name in settings]
        shown = [hparams.Metric(name) for name in metrics]
        summary = hparams.hparams_config_pb(columns, shown)
        content = summary.value[0].metadata.plugin_data
        described = HParamsPluginData.FromString(content.content)
        for column in described.experiment.hparam_infos:
            # The table shows five columns: those that are said to differ, then by name.
            column.differs = column.name in _FIRST_COLUMNS
        content.content = described.SerializeToString()
        self._add(summary, 0)
        self._add(hparams.hparams_pb(dict(settings)), 0)

    def first_screen(self, title: str, charts: Sequence[tuple[str, Sequence[str]]]) -> None:
        """The layout of the custom-scalars page: title and scalar names of each chart, which
        TensorBoard takes for patterns.
        """
        layout = layout_pb2.Layout()
        category = layout.category.add(title=title)
        for name, tags in charts:
            # Anchored: eval/pass_at_1 would also match eval/pass_at_1_error.
            patterns = [f"^{re.escape(tag)}$" for tag in tags]
            category.chart.add(title=name, multiline={"tag": patterns})
        summary = summary_pb2.Summary()
        summary.value.add(
            tag=custom_scalar_metadata.CONFIG_SUMMARY_TAG,
            metadata=custom_scalar_metadata.create_summary_metadata(),
            tensor=tensor_util.make_tensor_proto(layout.SerializeToString(), dtype=np.object_),
        )
        self._add(summary, 0)

    def restart(self, step: int) -> None:
        """Continue the run from here: TensorBoard discards `step` and later ones."""
        # TensorBoard drops later steps only at a START event.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, session_log=start))
        self._writer.flush()

    def flush(self) -> None:
        """Everything added so far is in the file afterwards."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and ends the background thread."""
        self._writer.close()

    def _described_once(self, name: str, summary: summary_pb2.Summary) -> summary_pb2.Summary:
        """Add title with unit, and meaning, if it is the metric's first value."""
        spec = describe(name)
        # Once per metric: with every point it would double the size of the file.
        if spec is not None and name not in self._described:
            self._described.add(name)
            metadata = summary.value[0].metadata
            metadata.display_name = with_unit(name, name)
            metadata.summary_description = spec.description
        return summary

    def _add(self, summary: summary_pb2.Summary, step: int) -> None:
        event = event_pb2.Event(wall_time=time.time(), step=step, summary=summary)
        if self._size_bytes > _ROTATE_BYTES:
            self._writer.close()
            self._writer = self._begin()
            self._size_bytes = 0
        self._size_bytes += event.ByteSize()
        self._writer.add_event(event)
