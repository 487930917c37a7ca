"""SGLang's tree over a daemon that packs its pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.proto.packing import packed_bytes
from support.eventually import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own
StartServer = Callable[..., Any]
PROMPT = list(range(40))
# Of K or V of a layer: 4 tokens with 8 heads of 32 values.
PAGE_BYTES = 2048


@pytest.fixture
def start_packing(start_server: StartServer) -> StartServer:
    from support.sglang_pools import ModelShape

    shape = ModelShape(heads=8, head_dim=32)
    return lambda directory, **options: start_server(directory, shape=shape, **options)


@pytest.mark.parametrize("kind", ["mha", "draft"])
def test_pages_are_packed_and_arrive_bit_for_bit(
    daemon: LocalDaemon, start_packing: StartServer, kind: str
) -> None:
    server = start_packing(daemon.directory, kind=kind, kvferry_pack="on")
    server.run(PROMPT)
    server.evict_all()
    wait_until(lambda: server.match(PROMPT).host_hit_length)
    assert server.run(PROMPT) == 36
    assert (server.compared, server.wrong, server.failed) == (9, 0, 0)
    layers = 4 if kind == "draft" else 3
    with OffloadClient(daemon.directory, engine="observer") as client:
        (engine,) = [each for each in client.status().engines if each.host_blocks]
    assert engine.host_block_bytes == 2 * layers * packed_bytes(PAGE_BYTES)


def test_servers_that_pack_share_nothing_with_others(
    daemon: LocalDaemon, start_packing: StartServer
) -> None:
    sizes = {"cpu_bytes_to_use": "4MiB"}
    packing = start_packing(daemon.directory, kvferry_pack="on", **sizes)
    other = start_packing(daemon.directory, kvferry_pack="off", **sizes)
    packing.run(PROMPT)
    packing.drain()
    assert other.run(PROMPT) == 0
    assert start_packing(daemon.directory, kvferry_pack="on", **sizes).run(PROMPT) == 36
