"""Functions that torch.compile makes faster on a GPU, and that run eagerly where it fails.

torch.compile joins operations that read the same tensor into one kernel. A function computes the
same with and without; only the order of roundings differs.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.exc import TorchDynamoException

_log = logging.getLogger(__name__)

_REASON_LENGTH = 500  # of a report that may contain a whole graph


class Compilation:
    """Functions that are compiled until the first failure; then all of them run eagerly."""

    def __init__(self) -> None:
        self._has_failed = False

    def of(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes as `eager`, for tensors of any sizes.

        It is compiled at its first call. A failure is logged once and ends nothing.
        """
        # The graph of the backward pass too is compiled at the first call, where a failure is
        # caught.
        torch._functorch.config.force_non_lazy_backward_lowering = True
        # A decoder block has one graph for each combination of: with and without a gradient,
        # prompts shared or not, one token or many, adapter on or off, policy, reference or critic,
        # and kind of layer. torch's stubs of `compile` lack the limit.
        fast = torch.compile(eager, dynamic=True, recompile_limit=64)  # type: ignore[call-overload]

        def call(*args: Any, **named: Any) -> Any:
            if not self._has_failed:
                try:
                    return fast(*args, **named)
                except TorchDynamoException as error:
                    # Raised before the graph runs, so nothing has been computed.
                    self._has_failed = True
                    _log.warning(
                        "torch.compile failed, so the learner runs without it, which is slower: %s",
                        " ".join(str(error).split())[:_REASON_LENGTH],
                    )
            return eager(*args, **named)

        return call
