"""The largest layouts, and larger ones, do not delay other clients and take little memory."""

from __future__ import annotations

import msgspec

from kvferry.client import Code, KVLayout, TensorLayout, TensorRef
from kvferry.proto.messages import Allocated, AllocateKVCaches, Error
from kvferry.proto.specs import MAX_REFS, MAX_TENSORS
from kvferry.testing.engine import StartSmallEngine
from kvferry.testing.plugin import StartKvferryd
from support.process_usage import ProcessUsage
from support.raw_client import RawClient

ENGINES = 8
PAGE = 64
TENSORS = (TensorLayout(1, PAGE, PAGE),) * MAX_TENSORS
REFS = tuple(TensorRef(tensor, PAGE) for tensor in range(MAX_TENSORS))
LARGEST = KVLayout(TENSORS, (REFS,) * (MAX_REFS // MAX_TENSORS))
TOO_LARGE = KVLayout(TENSORS, (*LARGEST.groups, REFS[:1]))


def test_a_client_that_sends_large_layouts_does_not_delay_others(
    start_engine: StartSmallEngine, start_kvferryd: StartKvferryd
) -> None:
    """A client sends three kinds of layouts in a loop, and another engine stores and loads.

    The layouts: 250,000 references (1.7 MB, refused before decoding), one reference too many, and
    a valid one that is larger than the pool.
    """
    other = start_engine(start_kvferryd())
    too_many_bytes = msgspec.msgpack.encode(
        ["allocatekvcaches", 1, [TENSORS, [REFS] * 60, 1], None, None, False]
    )
    with RawClient(other.directory, "rude") as rude:
        for _ in range(20):
            rude.send(too_many_bytes)
            rude.send(AllocateKVCaches(2, TOO_LARGE))
            rude.send(AllocateKVCaches(3, LARGEST, 1 << 46))
            other.finish(other.store(range(8), range(8)))
            other.finish(other.load(range(8), range(8)))
            errors = [rude.recv(Error).error for _ in range(3)]
            assert [error.code for error in errors] == [
                Code.MESSAGE_TOO_LARGE,
                Code.BAD_LAYOUT,
                Code.POOL_FULL,
            ]
            assert errors[1].value == str(MAX_REFS + 1)


def test_the_largest_layouts_take_little_memory(start_kvferryd: StartKvferryd) -> None:
    """A granted layout takes about 2 MB in the daemon: its arrays and its tensor mappings."""
    daemon = start_kvferryd(pool_bytes=64 << 20)
    sessions = [RawClient(daemon.directory, f"engine-{n}") for n in range(ENGINES + 1)]
    try:
        for n, session in enumerate(sessions):
            session.send(AllocateKVCaches(n, LARGEST, 1 << 20))
            assert session.recv(Allocated).request_id == n
            if n == 0:  # the first one also loads modules
                before = ProcessUsage.of(daemon.pid).private
        assert ProcessUsage.of(daemon.pid).private - before < ENGINES * (2 << 20)
    finally:
        for session in sessions:
            session.close()
