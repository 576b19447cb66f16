"""The JSON bodies of the API's requests; forms.toml has their fields."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from async_rl.core.errors import DataError
from async_rl.sessions.bodies import types_of


class LoraConfig(msgspec.Struct):
    """Of create_model."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


FORMS = types_of(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text()), {"lora": LoraConfig}
)


def read(body: bytes, form: str) -> Any:
    """Return a body as a form. Raises DataError with the path of the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=FORMS[form])
    # Deep nesting raises RecursionError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"bad request: {error}") from error


def words(metadata: Any) -> str:
    """Return metadata as JSON, with texts as values, which clients expect."""
    return msgspec.json.encode({name: str(it) for name, it in (metadata or {}).items()}).decode()
