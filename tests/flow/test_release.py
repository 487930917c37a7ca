"""An operator releases what engines keep and retain, by the command line."""

from __future__ import annotations

import pytest

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    LocalDaemon,
    OffloadClient,
    TensorLayout,
    TensorRef,
)
from support.command_line import kvferry

PAGE, BLOCKS = 1024, 64
FINGERPRINT = Fingerprint("llama", PAGE, key_bytes=1)
LAYOUT = KVLayout((TensorLayout(BLOCKS, PAGE, PAGE),), ((TensorRef(0, PAGE),),))
KEYS = [bytes([number]) for number in range(20)]
Captured = pytest.CaptureFixture[str]


def check(daemon: LocalDaemon, captured: Captured, command: str, status: int, text: str) -> None:
    assert kvferry(*command.split(), "-d", daemon.directory) == status
    output = "".join(captured.readouterr())
    assert text in output, output


def test_kept_tensors(kvferryd: LocalDaemon, capsys: Captured) -> None:
    with OffloadClient(kvferryd.directory, engine="llama") as client:
        client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20, keep=True)
    check(kvferryd, capsys, "status", 0, "64 KiB")
    check(kvferryd, capsys, "release llama", 0, "released 1.06 MiB kept for llama")
    check(kvferryd, capsys, "release llama", 1, "not_registered")


def test_retained_keys(kvferryd: LocalDaemon, capsys: Captured) -> None:
    with OffloadClient(kvferryd.directory, engine="llama") as client:
        name = client.open_namespace(FINGERPRINT, cpu_bytes_to_use=BLOCKS * PAGE).name
        client.allocate_kv_caches(LAYOUT)
        client.transfer_async(1, (GPULoadStoreSpec(range(20)), KeyLoadStoreSpec(KEYS)))
        client.wait([1])
        for label in ("x", "y", "z"):
            client.retain(KEYS[:3] if label == "x" else KEYS[5:6], 60.0, label)
        for command, status, text in (
            ("status", 0, "4 retained"),
            (f"release {name} --retained --label x", 0, f"3 KiB of {name} are no longer"),
            (f"release {name} --retained --label x", 0, "0 B"),
            (f"release {name} --retained", 0, f"1 KiB of {name} are no longer retained"),
            ("release other --retained", 1, "unknown_namespace"),
            (f"release {name} --label x", 2, "--label needs --retained"),
        ):
            check(kvferryd, capsys, command, status, text)
        assert client.namespaces()[0].retained == 0
