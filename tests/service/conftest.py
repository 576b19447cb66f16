from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Here: the tests of the front need no torch.
    from learner_support import make_model

    return make_model(tmp_path_factory.mktemp("model"))
