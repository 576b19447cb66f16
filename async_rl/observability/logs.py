"""One log file per process, `<run_dir>/logs/<process>.log`, in lines that a person reads.

    2026-11-20 19:30:15.123 INFO    generator-0  engine ready after 14.2 s
    2026-11-20 19:31:02.871 WARNING generator-0  [vllm.engine] ...

Everything that uses the logging module in the process arrives there, warnings of the warnings
module too; continued lines (tracebacks) are indented.  Logs are events that a person acts on;
numbers per step are metrics. Each process configures it once, before heavy imports.
"""

import logging
import logging.handlers
from pathlib import Path

from async_rl.core.text import visible

_CHATTY = ("httpx", "httpcore", "uvicorn.access", "urllib3", "asyncio", "filelock", "fsspec")


class _Lines(logging.Formatter):
    """Time, level, process, then the message; the logger's name only where it is not ours."""

    def __init__(self, process: str) -> None:
        form = f"%(asctime)s.%(msecs)03d %(levelname)-7s {process}  %(message)s"
        super().__init__(form, "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        source = "" if record.name.split(".")[0] in ("async_rl", "root") else f"[{record.name}] "
        record.message = source + visible(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        # `async-rl logs` recognises a new entry by a line that is not indented.
        return super().format(record).replace("\n", "\n    ")


def log_path(run_dir: Path, process: str) -> Path:
    """Return the log file of the process."""
    return run_dir / "logs" / f"{process}.log"


def output_path(run_dir: Path, process: str) -> Path:
    """Return the file with the output of the process and its libraries."""
    return run_dir / "logs" / f"{process}.out"


def configure_logging(run_dir: Path, process: str) -> logging.Logger:
    """Send all logging of this process to its file and return the project's logger. A second call
    replaces the first.
    """
    path = log_path(run_dir, process)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Watched: the file may be rotated away by a person, and a process that runs for weeks must
    # continue in the new one.
    handler = logging.handlers.WatchedFileHandler(path, mode="a", encoding="utf-8")
    handler.setFormatter(_Lines(process))
    # force: a second call, and libraries that configured logging at import, would add lines.
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.captureWarnings(True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    return logging.getLogger("async_rl")
