from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from learner_support import make_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def process_group() -> Iterator[None]:
    """Ends the group of one rank that a sharded trainer made in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
