"""Where the ranks of a broadcast meet: what they share, and what a stranger on the machine gets."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from weights_support import CPU, SEAT

from async_rl.core.errors import BroadcastBroken, DeadlineExceeded
from async_rl.protocol.weights import LookUp, Put, Seat
from async_rl.weights import communicator
from async_rl.weights import rendezvous as rendezvous_module
from async_rl.weights.communicator import Communicator, GlooCommunicator, begin, join
from async_rl.weights.rendezvous import Rendezvous, SeatStore
from async_rl.wire.keys import derived_keys
from async_rl.wire.rpc import RpcClient


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous("127.0.0.1")
    yield rendezvous
    rendezvous.close()


def seat(rendezvous: Rendezvous, name: str, **changes: Any) -> Seat:
    given = replace(SEAT, communicator=name, store=rendezvous.address, secret=rendezvous.secret)
    return replace(given, **changes)


@pytest.fixture
def stores(rendezvous: Rendezvous) -> Iterator[list[SeatStore]]:
    """Two ranks of `one`, which expects them, and one of `two`."""
    for name in ("one", "two"):
        rendezvous.open(name)
    stores = [SeatStore(seat(rendezvous, name)) for name in ("one", "one", "two")]
    yield stores
    for store in stores:
        store.close()


def test_a_value_is_there_for_the_ranks_of_its_communicator_only(stores: list[SeatStore]) -> None:
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


def test_ranks_that_have_all_met_connect_even_if_the_load_is_called_off_meanwhile(
    rendezvous: Rendezvous, stores: list[SeatStore]
) -> None:
    first, second, other = stores
    with ThreadPoolExecutor(2) as pool:
        for meeting in [pool.submit(store.meet) for store in (first, second)]:
            meeting.result(20)
        rendezvous.call_off("one")
        first.set("a", b"1")
        assert second.get("a") == b"1"
        early = pool.submit(other.meet)
        rendezvous.call_off("two")
        with pytest.raises(BroadcastBroken, match="a member was lost"):
            early.result(20)
    late = SeatStore(seat(rendezvous, "two"))
    with pytest.raises(BroadcastBroken, match="a member was lost"):
        late.meet()
    late.close()
    with pytest.raises(BroadcastBroken, match=r"rank 1 of 2.*there is no communicator three"):
        join(seat(rendezvous, "three"), 1, CPU)


def test_a_rank_notices_the_end_of_the_learner_long_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous_module, "LOOK_S", 0.1)
    monkeypatch.setattr(rendezvous_module, "ANSWER_S", 0.3)
    rendezvous = Rendezvous("127.0.0.1")
    rendezvous.open("one")
    store = SeatStore(seat(rendezvous, "one", timeout_s=3000.0))
    store.set("a", b"")  # it is connected
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(store.meet)
        rendezvous.close()
        with pytest.raises(DeadlineExceeded, match=f"{rendezvous.address} did not answer"):
            meeting.result(20)
    store.close()


def test_learners_of_one_machine_serve_ranks_side_by_side_and_leave_no_thread() -> None:
    before = set(threading.enumerate())
    both = [Rendezvous("127.0.0.1") for _ in range(2)]
    for rendezvous in both:
        rendezvous.open("one")
        store = SeatStore(seat(rendezvous, "one", world_size=1))
        store.meet()
        store.wait(["present"], timedelta(seconds=0.9))
        store.close()
        rendezvous.open("two")
        with pytest.raises(BroadcastBroken):
            join(seat(rendezvous, "three"), 1, CPU)
        rendezvous.close()
    assert set(threading.enumerate()) == before


def test_ranks_of_a_broadcast_connect_in_a_tree(rendezvous: Rendezvous) -> None:
    """A rank that connected to all would wait a second for each, and fill the filter of gloo."""
    num_ranks = 5
    rendezvous.open("one")
    sent = torch.arange(64, dtype=torch.uint8)
    tensors = [sent] + [torch.zeros(64, dtype=torch.uint8) for _ in range(num_ranks - 1)]

    def take_part(rank: int) -> None:
        group = join(seat(rendezvous, "one", world_size=num_ranks), rank, CPU)
        begin(group, tensors[rank], 0, timeout_s=20)()
        groups.append(group)

    groups: list[Communicator] = []
    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(take_part, range(num_ranks)))
    for group in groups:
        group.close()
    assert all(torch.equal(tensor, sent) for tensor in tensors)
    values = rendezvous.values["one"]
    dials = {value[0] for key, value in values.items() if "dials" in key and "," in key}
    assert len(dials) == num_ranks - 1


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


def test_the_error_of_a_broadcast_keeps_no_connection_open(
    monkeypatch: pytest.MonkeyPatch, rendezvous: Rendezvous
) -> None:
    def lose() -> None:
        raise RuntimeError("a peer is lost")

    class Work:
        wait = staticmethod(lose)

    works: list[weakref.ref[Any]] = []
    closed: list[str] = []

    class Group:
        def broadcast(self, _: object, options: Any) -> Work:
            assert options.timeout == timedelta(seconds=1)
            work = Work()
            works.append(weakref.ref(work))
            return work

    def connect(*_: object, **__: object) -> Group:
        group = Group()
        works.append(weakref.ref(group))
        return group

    monkeypatch.setattr(communicator, "private_gloo", connect)
    store: Any = SimpleNamespace(close=lambda: closed.append("store"))
    gloo = GlooCommunicator(store, seat(rendezvous, "one"), 0)
    with pytest.raises(RuntimeError) as kept:
        gloo.begin(torch.zeros(1), 0, timeout_s=1.0)
    gloo.close()
    assert (str(kept.value), closed) == ("a peer is lost", ["store"])
    assert [work() for work in works] == [None, None]
