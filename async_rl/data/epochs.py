"""The number of steps of a number of passes over the training data.

Rows that will be left out count too, because files are not checked here.
"""

from __future__ import annotations

import math

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, DataError
from async_rl.data import list_functions
from async_rl.data.embedded import LIST_FUNCTIONS
from async_rl.data.files import matching_files
from async_rl.data.tables import open_table


def steps_of_epochs(config: RunConfig) -> int:
    """Steps after which every training row was issued data.epochs times, the last step filled up.
    Raises ConfigError.
    """
    if config.data.epochs is None:
        raise ConfigError(
            "num_steps=null and data.epochs=null: nothing says how long the run is; set num_steps,"
            " or data.epochs=1"
        )
    if config.data.train_files:
        try:
            num_rows = sum(
                len(open_table(file, config.cache_dir))
                for file in matching_files(config.data.train_files)
            )
        except DataError as error:
            raise ConfigError(f"num_steps=null: the rows cannot be counted: {error}") from error
    else:
        num_rows = list_functions.NUM_WORDINGS * len(list_functions.split(LIST_FUNCTIONS)[0])
    return max(math.ceil(config.data.epochs * num_rows / config.buffer.groups_per_step), 1)
