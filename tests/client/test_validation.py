"""The client refuses arguments that no daemon can decode, with the name of the argument."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvferry.client import (
    Code,
    Fingerprint,
    OffloadClient,
    Refused,
    Timeline,
    shared_empty,
)
from kvferry.client.validation import check_fields
from kvferry.proto.messages import AllocateKVCaches, Hello, OpenNamespace
from support.fake_daemon import FakeDaemon
from support.raw_client import one_tensor

LAYOUT = one_tensor()
HUGE = msgspec.structs.replace(LAYOUT, block_size_factor=5000)
NO_GROUPS = msgspec.structs.replace(LAYOUT, groups=())
FLAT = msgspec.structs.replace(
    LAYOUT, tensors=(msgspec.structs.replace(LAYOUT.tensors[0], num_blocks=0),)
)


def register(**arguments: Any) -> Callable[[OffloadClient], object]:
    caches = {"layer": shared_empty((8, 64))}
    return lambda client: client.register_kv_caches(caches, num_blocks=8, **arguments)


def allocate(layout: Any = LAYOUT, **arguments: Any) -> Callable[[OffloadClient], object]:
    return lambda client: client.allocate_kv_caches(layout, **arguments)


def open_namespace(fingerprint: Any = None, **arguments: Any) -> Callable[[OffloadClient], object]:
    fingerprint = fingerprint or Fingerprint("llama", 64)
    return lambda client: client.open_namespace(fingerprint, **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (register(host_bytes=0), "host_bytes must be a whole number from 1 to .* or None .got 0."),
        (register(host_bytes="64"), "host_bytes .*got 64"),
        (register(host_bytes=1 << 70), "host_bytes .*got 1180591620717411303424"),
        (register(block_size_factor=0), "block_size_factor must be .* from 1 to 4096 .got 0."),
        (register(timeline="cpu"), "timeline must be a Timeline or None; .*Timeline.create"),
        (allocate(timeline=1), "timeline must be a Timeline or None; .*Timeline.create"),
        (allocate(host_bytes=1.5), r"host_bytes .*got 1\.5"),
        (allocate(HUGE), "block_size_factor .*got 5000"),
        (
            allocate(NO_GROUPS),
            "groups must be a list of 1 to 256 items, each a list of .* TensorRef .got 0.",
        ),
        (allocate(FLAT), "num_blocks must be .*got 0"),
        (allocate("wrong"), "layout must be a KVLayout .got wrong."),
        (allocate(keep=3), "keep must be True or False .got 3."),
        (open_namespace(store_threshold=0), "store_threshold must be .*got 0"),
        (open_namespace(store_threshold=True), "store_threshold must be a whole number"),
        (open_namespace(store_threshold=math.inf), "store_threshold must be a whole number"),
        (
            open_namespace(cpu_bytes_to_use=-1),
            "cpu_bytes_to_use must be .* from 0 to .* or None .got -1.",
        ),
        (open_namespace(cpu_bytes_to_use=math.nan), "cpu_bytes_to_use must be a whole number"),
        (open_namespace(cpu_bytes_to_use="64GiB"), "cpu_bytes_to_use must be a whole number"),
        (open_namespace(eviction_policy=None), "eviction_policy must be a text"),
        (
            open_namespace(eviction_policy="x" * 300),
            "eviction_policy must be a text of 0 to 256 .*xxx",
        ),
        (
            open_namespace(Fingerprint("llama", 64, key_bytes=65)),
            "key_bytes must be .* from 1 to 64 .got 65.",
        ),
        (open_namespace("llama"), "fingerprint must be a Fingerprint .got llama."),
        (
            open_namespace(Fingerprint("llama", 64, extra=cast(Any, ((1, 2), ("a", "b"))))),
            "extra must be a list .*got 2",
        ),
        (lambda client: client.release_kv_caches("x" * 300), "engine must be a text of 1 to 256"),
    ],
)
def test_invalid_arguments_are_refused_and_not_sent(
    fake_daemon: FakeDaemon,
    client: OffloadClient,
    call: Callable[[OffloadClient], object],
    message: str,
) -> None:
    before = list(fake_daemon.received)
    with pytest.raises(Refused, match=message) as refused:
        call(client)
    assert refused.value.code == Code.BAD_MESSAGE
    assert fake_daemon.received == before


def test_options_that_every_daemon_refuses_are_not_sent(
    fake_daemon: FakeDaemon, client: OffloadClient
) -> None:
    """See tests/proto/test_opening.py."""
    before = list(fake_daemon.received)
    with pytest.raises(Refused, match="use lru or arc") as refused:
        client.open_namespace(Fingerprint("llama", 64), eviction_policy="lfu")
    assert refused.value.code == Code.BAD_SPEC
    assert fake_daemon.received == before


def test_an_eviction_policy_is_named_in_any_case(
    fake_daemon: FakeDaemon, client: OffloadClient
) -> None:
    open_namespace(eviction_policy="S3FIFO")(client)
    assert [opening.policy for opening in fake_daemon.received_of(OpenNamespace)] == ["s3fifo"]


@pytest.mark.parametrize(
    "arguments", [{"engine": ""}, {"engine": "x" * 300}, {"engine": None}, {"client": "x" * 300}]
)
def test_an_invalid_name_is_refused(fake_daemon: FakeDaemon, arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(Refused, match=f"{name} must be a text of . to 256 characters"):
        OffloadClient(fake_daemon.directory, **arguments)
    assert fake_daemon.received == []


@pytest.mark.parametrize("timeout", ["1", math.nan, b"1", [1]])
def test_a_timeout_that_is_no_number_is_refused(
    fake_daemon: FakeDaemon, client: OffloadClient, timeout: Any
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: OffloadClient(fake_daemon.directory, timeout=timeout),
        lambda: client.status(timeout=timeout),
    ]
    for call in calls:
        with pytest.raises(Refused, match="timeout must be a number of seconds") as refused:
            call()
        assert refused.value.code == Code.BAD_SPEC


def test_what_belongs_to_a_process_cannot_be_pickled(client: OffloadClient) -> None:
    """A pickled timeline would be a copy, whose signals reach nobody."""
    bound: dict[object, str] = {
        client: "create a client in each process",
        Timeline.create("cpu"): "pass only its values to other processes; or create it with Time",
    }
    for value, instead in bound.items():
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=f"cannot be pickled or copied: .*{instead}"):
                copied(value)


def test_numbers_may_be_numpy_numbers() -> None:
    check_fields(AllocateKVCaches, layout=LAYOUT, host_bytes=np.int64(64), keep=True)
    check_fields(Hello, engine="llama", client="")
