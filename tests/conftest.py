"""Conditions that hold for every test, and how the suite is divided between two workers.

`make test` runs pytest-xdist with two workers; tests of one group run on one worker, one after the
other. A module is a group, since its tests share models and runs; so are the modules of a folder of
tests/e2e. Modules with live runs that measure time, or that use most of the machine, are one group
together.
"""

import os
import signal

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling

# Without a deadline: an example that takes 0.3 s on a busy machine is no failure.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", derandomize=False, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "reproducible"))
# The same examples in every run, so that a failure in CI is a failure everywhere. `make explore`
# looks for new examples.

ALONE = (
    "e2e/test_chaos.py",
    "e2e/test_learning.py",
    "launchers/test_ray_cluster.py",
    "launchers/test_slurm.py",
)
"""Modules that never run beside each other: they start many processes and expect progress in time.
Together they take about as long as half of the suite, so they start first.
"""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The loop of tests that are coroutines."""
    return "asyncio"


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored. Every child would inherit that, and
    # commands that end on Ctrl-C would not; a handler is reset to the default by exec.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: rank(item.nodeid))


class ByModule(LoadScopeScheduling):
    """Give each module to one worker, and all modules in ALONE to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if is_alone(nodeid) else scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByModule:
    # --dist loadgroup would do this with a marker, but pytest-xdist 3.8 writes the group into an
    # attribute that pytest 9.2 no longer reads, and spreads the tests of a group without a word.
    return ByModule(config, log)


def module_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def scope_of(nodeid: str) -> str:
    """The module, or the folder of modules that read one run: tests/e2e/resumed."""
    folder = module_of(nodeid).rpartition("/")[0]
    return folder if "/e2e/" in folder else module_of(nodeid)


def is_alone(nodeid: str) -> bool:
    return module_of(nodeid).endswith(ALONE)


def rank(nodeid: str) -> int:
    """Long groups first, so that the workers end at about the same time."""
    if is_alone(nodeid):
        return 0
    if "/generation/" in nodeid:
        return 1
    return 2 if "/e2e/" in nodeid else 3
