"""The ends of a command: its output can be encoded, and typed errors become exit codes, one line
per problem and no traceback.
"""

import codecs
import io
import sys
from typing import NoReturn

import typer

from async_rl.core.errors import AsyncRLError, ConfigError
from async_rl.core.extras import missing
from async_rl.core.os import owner_only

EXIT_WRONG_SETTINGS = 2
_SPELLED = {"–": "-", "⟨": "<", "⟩": ">", "±": "+-", "█": "#", "→": "->", "×": "x"}
"""The characters of our own output that ASCII lacks."""


@owner_only()
def run(app: typer.Typer) -> NoReturn:
    """Run a command line to its end."""
    codecs.register_error("spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        # A test or a notebook may have replaced them.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spelled")
    try:
        app()
    except AsyncRLError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        sys.exit(EXIT_WRONG_SETTINGS if isinstance(error, ConfigError) else 1)
    except OSError as error:
        # A path, its permissions or a full disk; without a path it is a fault of the code.
        if error.filename is None:
            raise
        remedy = "check the path, its permissions and the disk"
        typer.echo(f"error: {error.filename}: {error.strerror}; {remedy}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        # A command whose extra is not installed; any other missing module is a fault of the code.
        problem = missing(str(error.name).partition(".")[0], f"async-rl {' '.join(sys.argv[1:2])}")
        if problem is None:
            raise
        typer.echo(f"error: {problem}", err=True)
        sys.exit(EXIT_WRONG_SETTINGS)
    sys.exit(0)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for what an encoding lacks: responses, names and tables may have any letter."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_SPELLED.get(letter) or ascii(letter)[1:-1] for letter in lacking), error.end
