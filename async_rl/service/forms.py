"""The JSON bodies of the API's requests, and what is refused in them.

Unknown fields are ignored, because newer clients send more; values out of range are refused.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen

F = TypeVar("F")
Meta = msgspec.Meta
Number = Annotated[int, Meta(ge=0, lt=2**62)]
"""Of a request, or of what it makes. Those of samplers have 1e9 times the number of a clone."""
Rate = Annotated[float, Meta(ge=0, le=1e6)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Lifetime = Annotated[int, Meta(ge=3600, le=315_360_000)]
"""Seconds: an hour to ten years."""
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")]
"""Of a checkpoint: one component of a path."""
Metadata = dict[str, Any] | None
Filled = Annotated[str, Meta(min_length=1)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Top = Annotated[int, Meta(ge=0, le=20)]
DEVIATIONS: Mapping[str, str] = tomllib.loads(
    Path(__file__).with_name("deviations.toml").read_text()
)
WARNING = "This server differs from the API: " + "; ".join(
    f"{name}: {text}" for name, text in DEVIATIONS.items()
)


class NewSession(msgspec.Struct):
    """create_session."""

    user_metadata: Metadata = None
    display_name: str | None = None


class OptimizerConfig(msgspec.Struct):
    """Of create_model and load_weights."""

    type: str = "adamw"


class LoraConfig(msgspec.Struct):
    """Of create_model."""

    rank: Annotated[int, Meta(ge=0)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(msgspec.Struct):
    """create_model."""

    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata = None


class Numbered(msgspec.Struct):
    """The fields that every request of a training run has. They are read when it comes, the body of
    its kind when its turn comes, because then it has its number.
    """

    model_id: str
    seq_id: Number


class Reason(msgspec.Struct):
    """Why a session is finished."""

    type: Filled


class Finish(msgspec.Struct):
    """sessions/{id}/finish."""

    reason: Reason


class Page(msgspec.Struct):
    """The query of a list."""

    limit: Annotated[int, Meta(ge=0, le=1000)] = 20
    offset: Annotated[int, Meta(ge=0)] = 0


class Adam(msgspec.Struct):
    """The values of one step."""

    learning_rate: Rate = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    # Below, a gradient of 0 would give 0 / 0.
    eps: Annotated[float, Meta(ge=1e-30, le=1e6)] = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Annotated[float, Meta(ge=0)] = 0.0


class OptimStep(msgspec.Struct):
    """optim_step."""

    adam_params: Adam


class Save(msgspec.Struct):
    """save_weights, save_weights_for_sampler and save_weights_external."""

    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: Metadata = None
    age_encryption_recipients: list[str] | None = None


class Load(msgspec.Struct):
    """load_weights: into a run (model_id, seq_id) or as a new one (session_id, model_seq_id)."""

    path: str
    optimizer: bool
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata = None


class NewSampler(msgspec.Struct):
    """create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class Chunk(msgspec.Struct):
    """Part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Token] = []


class Prompt(msgspec.Struct):
    """Of asample."""

    chunks: list[Chunk]


class SamplingParams(msgspec.Struct):
    """Of asample."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: Seed | None = None
    stop: Filled | list[Filled | Token] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class AskSample(msgspec.Struct):
    """asample."""

    sampling_session_id: str
    seq_id: Number
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Top = 0
    topk_sample_logprobs: Top = 0
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


class Named(msgspec.Struct):
    """What a request with one field is about; a name that is missing is of nothing."""

    session_id: str = ""
    model_id: str = ""
    request_id: str = ""
    tinker_path: str = ""


class Ttl(msgspec.Struct):
    """PUT ttl."""

    ttl_seconds: Lifetime | None = None


@frozen
class Call:
    """A request of HTTP: its body, the parts of its path and its query."""

    body: bytes
    path: Mapping[str, str]
    query: Mapping[str, str]

    def read(self, kind: type[F]) -> F:
        """Return the body as a form. Raises DataError."""
        return read(self.body, kind)


def read(body: bytes, kind: type[F]) -> F:
    """Return a body as a form. Raises DataError with the path of the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    # Deep nesting raises RecursionError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"bad request: {error}") from error


def words(metadata: Metadata) -> str:
    """Return metadata as JSON, with texts as values, which clients expect."""
    texts = {name: str(value) for name, value in (metadata or {}).items()}
    return msgspec.json.encode(texts).decode()


def refuse(name: str) -> None:
    """Raise DataError if this value or feature is refused."""
    text = DEVIATIONS.get(name, "")
    if text.startswith("refused"):
        raise DataError(f"{name} is {text}")
