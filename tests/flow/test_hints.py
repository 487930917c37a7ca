"""Hints through a daemon's process: retained keys end in time, and by the command line."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.client import (
    AsyncOffloadClient,
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    LocalDaemon,
    OffloadClient,
    TensorLayout,
    TensorRef,
)
from kvferry.client.cli import main
from kvferry.testing.engine import until
from support.time_limits import TIMEOUT

PAGE, BLOCKS = 1024, 64
FINGERPRINT = Fingerprint("llama", PAGE, key_bytes=1)
LAYOUT = KVLayout((TensorLayout(BLOCKS, PAGE, PAGE),), ((TensorRef(0, PAGE),),))
KEYS = [bytes([number]) for number in range(20)]


def store(client: OffloadClient) -> None:
    client.open_namespace(FINGERPRINT, cpu_bytes_to_use=BLOCKS * PAGE)
    client.allocate_kv_caches(LAYOUT)
    spec = GPULoadStoreSpec(range(len(KEYS))), KeyLoadStoreSpec(KEYS)
    client.transfer_async(1, spec)
    client.wait([1])
    (result,) = client.get_finished()
    assert result.success


def retained(client: OffloadClient) -> int:
    (namespace,) = client.namespaces()
    return namespace.retained


def test_retained_keys_end_in_time(kvferryd: LocalDaemon) -> None:
    with OffloadClient(kvferryd.directory, engine="llama") as client:
        store(client)
        short, long = client.retain(KEYS[:2], 0.5), client.retain(KEYS[2:], 60.0)
        assert retained(client) == 16
        assert (short.kept, long.kept, long.clipped) == (2, 14, 4)
        until(lambda: retained(client) == 14, TIMEOUT)


def test_an_operator_ends_what_is_retained(
    kvferryd: LocalDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    option = ["-d", str(kvferryd.directory)]
    with OffloadClient(kvferryd.directory, engine="llama") as client:
        store(client)
        for label in ("x", "y", "z"):
            client.retain(KEYS[:3] if label == "x" else KEYS[5:6], 60.0, label)
        name = client.namespace.opened.name
        for arguments, exit_status, expected in (
            (["status"], 0, "4 retained"),
            (["release", name, "--retained", "--label", "x"], 0, f"3 KiB of {name} are no longer"),
            (["release", name, "--retained", "--label", "x"], 0, "0 B"),
            (["release", name, "--retained"], 0, f"1 KiB of {name} are no longer retained"),
            (["release", "other", "--retained"], 1, "unknown_namespace"),
            (["release", name, "--label", "x"], 2, "--label needs --retained"),
        ):
            with pytest.raises(SystemExit) as ended:
                main([*arguments, *option])
            output = "".join(capsys.readouterr())
            assert expected in output, output
            assert ended.value.code == exit_status
        assert retained(client) == 0


def test_asyncio_clients_send_hints(kvferryd: LocalDaemon) -> None:
    async def retain() -> int:
        async with await AsyncOffloadClient.connect(kvferryd.directory, engine="llama") as client:
            opened = await client.open_namespace(FINGERPRINT)
            retention = client.retain(KEYS[:3], 60.0)
            while not retention.done:
                await client.status()
            client.release(KEYS[:1])
            assert retention.kept == 3
            return await client.release_retained(opened.name) // PAGE

    with OffloadClient(kvferryd.directory, engine="llama") as client:
        store(client)
        assert asyncio.run(retain()) == 2
