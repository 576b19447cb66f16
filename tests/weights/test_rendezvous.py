"""Where the ranks of a broadcast meet: what they share, and what a stranger on the machine gets."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from msgspec.structs import replace
from weights_support import SEAT

from async_rl.core.errors import DeadlineExceeded
from async_rl.protocol.weights import LookUp, Put
from async_rl.weights.rendezvous import Rendezvous, SeatStore
from async_rl.wire.rpc import RpcClient, derived_keys


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous("127.0.0.1")
    yield rendezvous
    rendezvous.close()


def test_a_value_is_there_for_the_ranks_of_its_communicator_only(rendezvous: Rendezvous) -> None:
    for name in ("one", "two"):
        rendezvous.open(name)
    seat = replace(SEAT, store=rendezvous.address, secret=rendezvous.secret)
    stores = [SeatStore(replace(seat, communicator=name)) for name in ("one", "one", "two")]
    first, second, other = stores
    assert not second.check(["a"])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.wait, ["a", "b"], timedelta(seconds=20))
        first.set("a", b"\0\xff")
        first.set("b", "text")
        waiting.result(20)
    second.set("a", "the first value stays")
    assert (second.get("a"), second.get("b"), first.get("a")) == (b"\0\xff", b"text", b"\0\xff")
    assert [first.add("n", 1), second.add("n", 1)] == [1, 2]
    assert not other.check(["a"])
    with pytest.raises(RuntimeError, match=r"no other rank wrote a, c within 0\.01 s"):
        second.wait(["a", "c"], timedelta(seconds=0.01))
    for store in stores:
        store.close()


async def test_a_stranger_reads_and_changes_nothing_and_the_run_names_it(
    rendezvous: Rendezvous, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows the protocol and the public key of the server, which is no secret."""
    rendezvous.open("one")
    public = derived_keys(rendezvous.secret).server_public
    keys = replace(derived_keys("a secret of its own"), server_public=public)
    with caplog.at_level(logging.WARNING):
        async with RpcClient(rendezvous.address, keys) as stranger:
            for attack in (
                LookUp(communicator="one", keys=["0/1"], wait_s=0.0),
                Put(communicator="one", key="dials to 127.0.0.1:1, 1", value=b"[]"),
                Put(communicator="one", key="verdict", value=b"lost"),
            ):
                with pytest.raises(DeadlineExceeded):
                    await stranger.call(attack, timeout_s=0.2)
    assert f"without the keys of this run has tried to use {rendezvous.address}" in caplog.text
    assert rendezvous.values == {"one": {}}
