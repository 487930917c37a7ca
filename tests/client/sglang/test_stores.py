"""Stores of nodes, with a real manager. No SGLang needed."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.client.engines.rank_session import WAIT_TIMEOUT
from kvferry.client.sglang.block_ids import BlockIds
from kvferry.client.sglang.stores import Stores
from kvferry.client.sglang.transfers import RankTransfers
from kvferry.proto.keys import OffloadKey
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KeyLoadStoreSpec
from support.client_keys import HIT, MISS, PENDING, A, B, C, D, Start, answers, open_manager
from support.fake_daemon import FakeDaemon
from support.sglang_stand_ins import NamedSource, RecordingSession, pages, result

SOURCE = NamedSource("kv", 4, range(1))


class PendingBlocks(BlockIds):
    """Block numbers whose slots are not in host memory yet."""

    ready = False


class Node:
    """The stores of a server of one rank, at a time that the test sets."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon, self.manager = daemon, open_manager(daemon)
        self.session, self.now = RecordingSession(), 100.0
        session: Any = self.session
        self.transfers = RankTransfers(session, "forward stream")
        self.left_out: set[OffloadKey] = set()
        self.stores = Stores(
            session, self.manager, self.transfers, self._own, clock=lambda: self.now
        )

    def _own(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        return [key for key in keys if key not in self.left_out]

    def offer(self, *keys: OffloadKey, kind: type[BlockIds] = BlockIds) -> None:
        blocks = range(1, len(keys) + 1)
        self.stores.offer(kind([pages(SOURCE, [(key,) for key in keys], blocks)], 1))

    def step(self) -> int:
        """As KVFerryLinker.num_completed_offloads."""
        self.transfers.poll()
        self.stores.advance()
        return self.stores.ended

    def jobs(self) -> dict[int, tuple[tuple[OffloadKey, ...], list[int]]]:
        """The keys and GPU blocks of each submitted job."""
        found = {}
        for job_id, (spec, direction, stream) in self.session.submitted.items():
            source, destination = spec
            assert isinstance(source, GPULoadStoreSpec)
            assert isinstance(destination, KeyLoadStoreSpec)
            assert (direction, stream) == (Direction.STORE, "forward stream")
            found[job_id] = destination.keys, source.block_ids.tolist()
        return found


@pytest.fixture
def node(fake_daemon: FakeDaemon) -> Node:
    return Node(fake_daemon)


def test_a_node_is_stored(node: Node) -> None:
    node.offer(A, B)
    assert node.session.submitted == {}
    assert node.step() == 0
    assert node.jobs() == {1: ((A, B), [1, 2])}
    assert answers(node.manager, A, B) == [PENDING, PENDING]
    node.daemon.store(A, B)
    node.session.end(result(1))
    assert node.step() == len(node.stores) == 1
    assert node.stores.take() is True
    assert (node.step(), len(node.stores)) == (0, 0)
    assert answers(node.manager, A, B) == [HIT, HIT]


def test_results_are_in_the_order_of_the_offers(node: Node) -> None:
    for key in (A, B, C):
        node.offer(key)
    node.step()
    node.session.end(result(2), result(3, success=False))
    assert node.step() == 0
    node.session.end(result(1))
    assert node.step() == 3
    assert [node.stores.take() for _ in range(3)] == [True, True, False]


def test_a_node_waits_for_its_slots_and_those_behind_it_too(node: Node) -> None:
    node.offer(A)
    node.offer(B, kind=PendingBlocks)
    node.offer(C)
    node.session.on_poll = [[], [result(1)]]
    assert node.step() == 0
    assert node.step() == 1
    assert node.jobs() == {1: ((A,), [1])}


def test_only_what_is_not_resident_is_stored(node: Node) -> None:
    node.daemon.store(A)
    node.daemon.reserve(C)
    node.manager.poll()
    node.offer(A)
    assert node.step() == 1
    assert node.stores.take() is True
    assert node.session.submitted == {}
    node.offer(A, B, C, D)
    node.offer(D, B)  # the first store has them
    assert node.step() == 0
    assert node.jobs() == {1: ((B, D), [2, 4])}
    node.session.end(result(1))
    assert node.step() == 2


def test_keys_of_other_ranks_are_left_out(node: Node) -> None:
    node.left_out = {A, C}
    node.offer(A, B, C)
    node.offer(A)
    node.step()
    assert node.jobs() == {1: ((B,), [2])}
    node.session.end(result(1))
    assert node.step() == 2
    assert [node.stores.take(), node.stores.take()] == [True, True]


def test_a_node_that_cannot_be_stored_fails(start_fake_daemon: Start) -> None:
    """It is larger than the namespace, or there is no daemon."""
    node = Node(start_fake_daemon(num_blocks=2))
    node.offer(A, B, C)
    assert node.step() == 1
    assert node.stores.take() is False
    node.daemon.disconnected = True
    node.manager.poll()
    node.offer(A)
    assert node.step() == 1
    assert node.stores.take() is False
    assert node.session.submitted == {}


def test_a_store_that_cannot_be_submitted_fails(node: Node) -> None:
    node.session.refused = True
    node.offer(A)
    node.step()
    assert node.step() == 1
    assert node.stores.take() is False
    assert answers(node.manager, A) == [MISS]


def test_slots_that_are_no_pages_fail_and_are_logged(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = pages(SOURCE, [(A,)], [1])
    wrong.indices.add_(1)
    node.stores.offer(BlockIds([wrong], 1))
    node.offer(B)
    assert node.step() == 1
    assert node.stores.take() is False
    assert "a node is not stored" in caplog.text
    assert answers(node.manager, A) == [MISS]
    assert [keys for keys, _ in node.jobs().values()] == [(B,)]


def test_a_lost_store_fails_and_is_offered_again(node: Node) -> None:
    node.offer(A)
    node.step()
    node.session.end(result(1, success=False))
    assert node.step() == 1
    assert node.stores.take() is False
    node.offer(A)
    node.step()
    assert node.jobs() == {1: ((A,), [1]), 2: ((A,), [1])}


def test_a_store_that_does_not_end_abandons_the_session(node: Node) -> None:
    node.offer(C)
    node.offer(A)
    node.step()
    node.now += WAIT_TIMEOUT / 2
    node.offer(B)
    node.step()
    assert node.session.abandoned == []
    node.now += 0.75 * WAIT_TIMEOUT
    assert node.step() == 0
    (error,) = node.session.abandoned
    assert "a store has not ended within 10 s" in str(error)
    assert node.step() == 3
    assert [node.stores.take() for _ in range(3)] == [False] * 3


def test_during_a_reset_nothing_is_submitted(node: Node) -> None:
    node.daemon.slow = True
    node.manager.reset_cache()
    node.offer(A)
    assert node.step() == 0
    assert node.session.submitted == {}
    node.daemon.finish_resets()
    node.manager.poll()
    node.step()
    assert node.jobs() == {1: ((A,), [1])}


def test_all_stores_end(node: Node) -> None:
    node.offer(A)
    node.step()
    node.offer(B)
    node.stores.end_all()
    assert (node.session.waited, len(node.stores)) == (1, 0)
    assert answers(node.manager, A, B) == [MISS, MISS]
    assert node.step() == 0
