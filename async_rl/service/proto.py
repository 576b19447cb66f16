"""The protobuf messages of the Tinker API (SDK 0.25 to 0.38), and their tensors as arrays.

messages.json describes them in the JSON form of protobuf's own descriptors. The numbers of the
fields are facts of the API (package `tinker_public`); field 1000 of SampledSequence is an extension
of this project, which clients of others pass over. What the API has as a choice are fields of which
one is there. Images and sounds are messages without fields: they are recognized and refused.
"""

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, json_format, message, message_factory

from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.core.types import FloatArray, IntArray

AnyArray = npt.NDArray[Any]

_MOST_CELLS = 2**26
"""Of a sparse matrix: a few bytes may describe one that fits into no memory."""
_FLOAT32 = np.dtype("<f4")
_INT64 = np.dtype("<i8")
_INT32 = np.dtype("<i4")
_DTYPES: Mapping[int, np.dtype[Any]] = {1: _FLOAT32, 2: _INT64, 3: _INT32}


_TEXT = resources.files(__package__).joinpath("messages.json").read_text()
_FILE = json_format.Parse(_TEXT, descriptor_pb2.FileDescriptorProto())
# A separate pool: the client's has messages of the same names.
_CLASSES: Mapping[str, Any] = message_factory.GetMessages([_FILE])
SampleResponse: Any = _CLASSES["tinker.SampleResponse"]
ForwardBackwardOutput: Any = _CLASSES["tinker.ForwardBackwardOutput"]
ForwardBackwardRequest: Any = _CLASSES["tinker.ForwardBackwardRequest"]
ProvenanceSpan: Any = _CLASSES["tinker.ProvenanceSpan"]


Spans = Sequence[Any]
"""Messages ProvenanceSpan of consecutive tokens, of a sampled sequence or of its prompt."""


@frozen
class Datum:
    """One row of a batch.

    tokens: int32 [N]; inputs: by name, each [N, ...], float32 or int64; a sparse tensor is dense
    here.  input_spans, target_spans: provenance of the tokens and of `target_tokens`.
    """

    tokens: IntArray
    inputs: Mapping[str, AnyArray]
    input_spans: Spans = ()
    target_spans: Spans = ()


@frozen
class Drawn:
    """A sampled sequence. prompt int32 [P]; tokens int32, logprobs float32, versions int32 [N];
    run_id: whose weights drew it, empty for the base model.
    """

    sequence_id: str
    prompt: IntArray
    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    run_id: str

    def datum(self, advantage: float) -> Datum:
        """Return the sequence as a row for a loss with log-probs and advantages, with the origin of
        its targets. Every sampled token has this advantage, the prompt 0.
        """
        whole = np.r_[self.prompt, self.tokens]
        prompt = np.zeros(len(self.prompt) - 1, np.float32)
        before = {"sequence_id": self.sequence_id, "offset": 1, "length": len(prompt)}
        drawn = {"sequence_id": self.sequence_id, "length": len(self.tokens)}
        return Datum(
            tokens=whole[:-1],
            inputs={
                "target_tokens": whole[1:],
                "logprobs": np.r_[prompt, self.logprobs],
                "advantages": np.r_[prompt, np.full(len(self.tokens), advantage, np.float32)],
            },
            target_spans=[
                ProvenanceSpan(prompt_tokens=before),
                ProvenanceSpan(sampled_tokens=drawn),
            ],
        )


def drawn_of(answer: bytes, request_id: str, prompt: IntArray, run_id: str) -> list[Drawn]:
    """Return the sequences in the answer to a request for samples."""
    return [
        Drawn(
            sequence_id=f"{request_id}.{index}",
            prompt=prompt,
            tokens=np.frombuffer(sequence.tokens, _INT32),
            logprobs=np.frombuffer(sequence.logprobs, _FLOAT32),
            versions=np.frombuffer(sequence.versions, _INT32),
            run_id=run_id,
        )
        for index, sequence in enumerate(SampleResponse.FromString(answer).sequences)
    ]


@frozen
class ForwardBackward:
    """A request of forward_backward or forward."""

    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str]


def decode(body: bytes) -> Any:
    """Return the message of a request. Raises DataError if it is none."""
    request = ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except message.DecodeError as error:
        raise DataError(f"the body is not a ForwardBackwardRequest: {error}") from error
    return request


def parse_forward_backward(body: bytes) -> ForwardBackward:
    """Return what a request has. Raises DataError if it is none."""
    request = decode(body)
    values = request.loss_fn_config_v2.items()
    given = {key: it.text if it.HasField("text") else it.number for key, it in values}
    return ForwardBackward(
        data=[_datum(index, datum) for index, datum in enumerate(request.data)],
        loss_fn=request.loss_fn,
        config={**request.loss_fn_config, **given},
    )


def _datum(index: int, datum: Any) -> Datum:
    parts = [np.empty(0, np.int32)]
    inputs: dict[str, AnyArray] = {}
    field = "model_input"
    try:
        for chunk in datum.model_input:
            if not chunk.HasField("encoded_text"):
                raise ValueError("a chunk is not text; only tokens can be trained")
            parts.append(np.frombuffer(chunk.encoded_text.tokens, _INT32))
        for field, tensor in datum.loss_fn_inputs.items():
            inputs[field] = _array(tensor)
    except ValueError as error:
        raise DataError(f"datum {index}: {field}: {error}") from error
    return Datum(
        tokens=np.concatenate(parts),
        inputs=inputs,
        input_spans=datum.model_input_spans,
        target_spans=datum.loss_fn_input_spans,
    )


def encode_batch(
    data: Sequence[Datum], model_id: str, seq_id: int, loss_fn: str, config: Mapping[str, float]
) -> bytes:
    """Return the body of a request of forward_backward."""
    request = ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, loss_fn_config=config
    )
    for datum in data:
        made = request.data.add()
        made.model_input.add().encoded_text.tokens = datum.tokens.astype(_INT32).tobytes()
        for name, values in datum.inputs.items():
            _fill(made.loss_fn_inputs[name], values)
        made.model_input_spans.extend(datum.input_spans)
        made.loss_fn_input_spans.extend(datum.target_spans)
    return bytes(request.SerializeToString())


def _array(tensor: Any) -> AnyArray:
    """Return the values of a Tensor, a sparse one with zeros. Raises ValueError if bytes, type and
    shape do not agree.
    """
    dtype = _DTYPES.get(tensor.dtype)
    shape = tuple(tensor.shape)
    if dtype is None or min(shape, default=0) < 0:
        raise ValueError(
            f"it has the dtype {tensor.dtype} and the shape {shape}; send float32 or int64"
        )
    if not tensor.HasField("sparse_csr"):
        # A vector may come without a shape.
        return np.frombuffer(tensor.dense, dtype).reshape(shape or -1)
    sparse = tensor.sparse_csr
    crow, col = (np.frombuffer(part, _INT64) for part in (sparse.crow_indices, sparse.col_indices))
    rows, columns = _cells_of(crow, col, shape)
    array = np.zeros(shape, dtype)
    array[rows, columns] = np.frombuffer(sparse.values, dtype).reshape(len(columns))
    return array


def _cells_of(crow: AnyArray, col: AnyArray, shape: tuple[int, ...]) -> tuple[AnyArray, AnyArray]:
    """Return rows and columns of the values of a CSR matrix. Raises ValueError if it is none."""
    is_valid = (
        len(shape) == 2
        and shape[0] * shape[1] <= _MOST_CELLS
        and len(crow) == shape[0] + 1
        and crow[0] == 0
        and (np.diff(crow) >= 0).all()
        and crow[-1] == len(col)
        and ((col >= 0) & (col < shape[1])).all()
    )
    if not is_valid:
        raise ValueError(f"it is not a CSR matrix of the shape {shape}")
    return np.repeat(np.arange(shape[0]), np.diff(crow)), col


def _fill(tensor: Any, values: AnyArray) -> None:
    """Put an array into a Tensor, as float32 or int64."""
    tensor.dtype = 1 if values.dtype.kind == "f" else 2
    tensor.dense = values.astype(_DTYPES[tensor.dtype]).tobytes()
    tensor.shape.extend(values.shape)


def forward_backward_output(logprobs: Sequence[FloatArray], metrics: Mapping[str, float]) -> bytes:
    """Encode the answer to forward_backward.

    logprobs: float32 [N] or [N, K] of each datum; metrics: their names end with `:` and the way in
    which parts of a batch are merged, as in loss:sum.
    """
    output = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        output.metrics[name] = value
    record = output.loss_fn_outputs.add(num_datums=len(logprobs))
    batched = record.fields["logprobs"]
    batched.data = b"".join(row.astype("<f4").tobytes() for row in logprobs)
    ends = np.cumsum([0, *(4 * row.size for row in logprobs)], dtype="<i8")
    batched.offsets = ends.tobytes()
    batched.dtype = 1
    batched.trailing_shape.extend(logprobs[0].shape[1:] if logprobs else ())
    return bytes(output.SerializeToString())


def read_output(answer: bytes) -> tuple[list[FloatArray], dict[str, float]]:
    """Return the log-probs of each datum, and the metrics, as `forward_backward_output`."""
    output = ForwardBackwardOutput.FromString(answer)
    batched = output.loss_fn_outputs[0].fields["logprobs"]
    values = np.frombuffer(batched.data, _FLOAT32).reshape(-1, *batched.trailing_shape)
    ends = np.frombuffer(batched.offsets, _INT64)[1:-1] // (values[:1].nbytes or 1)
    return np.split(values, ends), dict(output.metrics)
