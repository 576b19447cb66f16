"""The recorded times of a run in a file, so that another machine can forecast from them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.runs.forecast.recorded import Recorded
from async_rl.runs.forecast.simulation import Scenario

_FORM = 2


@frozen
class Profile:
    """origin: the run that was measured. scenario: its own settings. ranks: of its learner.
    group_size: samples of a group. generator_mb, verifier_mb: memory of one of them, total_mb: of
    the whole run; None: unknown. place_setting: the one that limits the samples scored at once.
    """

    origin: str
    recorded: Recorded
    scenario: Scenario
    ranks: int
    group_size: int
    generator_mb: int | None
    total_mb: int | None
    place_setting: str = ""
    verifier_mb: int = 0
    form: int = _FORM


def write_profile(profile: Profile, file: Path) -> None:
    """Write a profile. Raises ConfigError if the file exists or cannot be written."""
    try:
        with file.open("xb") as target:
            target.write(msgspec.json.encode(profile))
    except OSError as error:
        raise ConfigError(f"--save {file}: {error.strerror}; choose another file") from error


def read_profile(file: Path) -> Profile:
    """Read a profile. Raises ConfigError if it is not one of this version."""
    try:
        content = file.read_bytes()
        form = msgspec.json.decode(content, type=dict[str, object]).get("form")
        if form != _FORM:
            raise ConfigError(
                f"profile={file}: has form {form}, this version reads {_FORM}; write it again with"
                " async-rl plan RUN --save FILE"
            )
        return msgspec.json.decode(content, type=Profile)
    except OSError as error:
        raise ConfigError(f"profile={file}: {error.strerror}; name a file of --save") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"profile={file}: is no profile ({error}); name a file of --save"
        ) from error
