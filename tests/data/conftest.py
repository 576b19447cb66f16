from typing import Any

import pytest
from data_support import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()
