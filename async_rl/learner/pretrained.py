"""Weights of a Hugging Face directory, read one unit of a sharded model at a time.

A learner of several ranks, or with a GPU, never has a whole model in main memory: a rank builds the
model without values, and for each unit of FSDP reads the unit's weights, shards them and drops the
rest. Beside its share it needs memory for one unit.
Invariant: the values equal the values of transformers' `from_pretrained`, in float32 or the chosen
type.
"""

from __future__ import annotations

import collections
import copy
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

# Weights of other types have scales next to them, which transformers applies on loading.
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
_EXPERT = re.compile(r"(.+\.experts\.)\d+\.(?:(gate_|up_)|down_)proj\.weight")
"""A matrix of one expert in the files."""


class PretrainedWeights:
    """The safetensors files of a model. Tensors and parameters of the model have equal names, but
    files have the matrices of each expert, which are rows of one parameter of all experts.
    """

    def __init__(self, path: Path, *, trust_remote_code: bool) -> None:
        self._path = path
        self._config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        self._trust_remote_code = trust_remote_code
        self._experts: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, list[int]] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118  safe_open is no mapping
                    stored = weights.get_slice(name)
                    if stored.get_dtype() in _PLAIN_TYPES:
                        self._files[name] = file
                        self._shapes[name] = stored.get_shape()
        # Experts by number, and gate before up.
        for name in sorted(self._files, key=lambda name: [x.zfill(6) for x in name.split(".")]):
            if found := _EXPERT.fullmatch(name):
                stem, is_up = found.groups()
                whole = "gate_up_proj" if is_up else "down_proj"
                self._experts[stem + whole].append(name)

    @classmethod
    def open(cls, path: Path, *, trust_remote_code: bool) -> PretrainedWeights | None:
        """Open a directory. None if its weights must be converted or renamed on loading, are
        quantised, or have another format: such a model has to be loaded whole.
        """
        try:
            weights = cls(path, trust_remote_code=trust_remote_code)
            lm = weights.empty_model()
        except (OSError, ValueError, SafetensorError):
            # Loading the whole model reports the reason.
            return None
        fits = (weights._fits(name, list(p.shape)) for name, p in lm.named_parameters())
        return weights if all(fits) else None

    def _parts(self, name: str) -> list[str]:
        """Return the stored tensors that are, one below the other, the rows of a parameter."""
        return [name] if name in self._files else self._experts.get(name, [])

    def _fits(self, name: str, shape: list[int]) -> bool:
        """Return whether the stored tensors have the values of a parameter of this shape."""
        shapes = [self._shapes[part] for part in self._parts(name)]
        if shapes == [shape]:
            return True
        rows = [each[0] for each in shapes if each[1:] == shape[2:]]
        return len(rows) == len(shapes) and sum(rows) == math.prod(shape[:2])

    def empty_model(self) -> PreTrainedModel:
        """Return the model with parameters on the meta device; buffers have their values."""
        with init_empty_weights(include_buffers=False):
            lm: PreTrainedModel = AutoModelForCausalLM.from_config(
                self._config, dtype=torch.float32, trust_remote_code=self._trust_remote_code
            )
        lm.tie_weights()
        # Those that a checkpoint keeps, such as the bias of a router.
        for name, values in lm.named_buffers():
            if name in self._files:
                values.copy_(self._read(name))
        return lm

    def _read(self, name: str) -> torch.Tensor:
        # Opened for each tensor: pages of an open file would count as memory of this process.
        with safe_open(self._files[name], framework="pt") as weights:
            tensor: torch.Tensor = weights.get_tensor(name)
        return tensor

    def first_layers(self) -> PreTrainedModel:
        """Return a model of the first layers with the real weights: enough of them that each kind
        of attention in the model is present.
        """
        config = copy.deepcopy(self._config)
        text = config.get_text_config()
        kinds = list(getattr(text, "layer_types", None) or [])
        # Two, because some models share keys and values between neighbours.
        count = max(2, *(kinds.index(kind) + 1 for kind in kinds), 0)
        if kinds:
            text.layer_types = kinds[:count]
        text.num_hidden_layers = min(count, text.num_hidden_layers)
        verbosity = logging.get_verbosity()
        # The weights of the other layers are reported as unexpected.
        logging.set_verbosity_error()
        try:
            lm: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                self._path,
                config=config,
                dtype=torch.float32,
                trust_remote_code=self._trust_remote_code,
            )
        finally:
            logging.set_verbosity(verbosity)
        return lm

    def fill(
        self, unit: nn.Module, *, names: Mapping[nn.Parameter, str], dtype: torch.dtype
    ) -> None:
        """Replace the parameters of a unit that are still on the meta device by real ones.

        names: of the model's parameters in the files.
        """
        # Tied parameters stay one object: they are in one unit.
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in unit.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if not parameter.is_meta:
                    continue
                if parameter not in made:
                    # An adapter wraps the layer whose weight is in the file.
                    stored = names[parameter].replace(".base_layer.", ".")
                    values = torch.empty(parameter.shape, dtype=dtype)
                    end = 0
                    for part in map(self._read, self._parts(stored)):
                        start = end
                        end = end + part.numel()
                        values.view(-1)[start:end] = part.view(-1)
                    made[parameter] = nn.Parameter(values, parameter.requires_grad)
                module.register_parameter(name, made[parameter])
