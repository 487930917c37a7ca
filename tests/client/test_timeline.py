"""Timelines, on a CPU and on a simulated GPU."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.client import Code, Failed, LocalDaemon, OffloadClient, Refused, Timeline, shared_empty
from kvferry.client import timeline as module
from kvferry.client.tensors import CanonicalKVCaches
from kvferry.client.vllm.worker_side import WorkerSide
from support.raw_client import one_tensor
from support.vllm_stand_ins import engine_config_at, kv_caches


def count_pages() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvferry-timeline")


class RecordingDriver:
    """Does nothing. visited: ordinals of GPUs. calls: with their arguments. pages: that are mapped
    at each call. failing: functions."""

    def __init__(self) -> None:
        self.visited, self.calls, self.failing = list[int](), list[Any](), set[str]()
        self.pages = list[int]()

    def visiting(self, ordinal: int) -> nullcontext[None]:
        self._check("visiting")
        self.visited.append(ordinal)
        return nullcontext()

    def register_host(self, *_: object, **__: object) -> None:
        self._check("register_host")

    def host_device_pointer(self, address: int) -> int:
        self._check("host_device_pointer")
        return address

    def drain(self, context: object) -> None:
        self.call("drain", context)

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        self.pages.append(count_pages())
        self._check(name)

    def _check(self, name: str) -> None:
        if name in self.failing:
            raise Failed(Code.DRIVER, f"{name}: no")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    driver = RecordingDriver()
    monkeypatch.setattr(module, "driver", lambda: driver)
    return driver


@pytest.mark.parametrize(
    ("device", "visited"),
    [
        ("cuda", [0]),
        ("cuda:11", [11]),
        (torch.device("cuda"), [0]),
        (torch.device("cuda", 1), [1]),
        ("cpu:0", []),
        (torch.device("cpu"), []),
    ],
)
def test_a_timeline_of_a_device(
    driver: RecordingDriver, device: object, visited: list[int]
) -> None:
    timeline = Timeline.create(device)
    assert (timeline.kind, driver.visited) == ("cuda" if visited else "cpu", visited)
    timeline.close()
    assert driver.visited == visited * 2


@pytest.mark.parametrize(
    "device",
    ["CUDA", "gpu", "cuda0", "cuda:", "cuda:x", "cuda:-1", "GPU-1234", "", 0, None, "xpu"],
)
def test_a_device_that_has_no_timeline(device: object) -> None:
    with pytest.raises(Refused, match="cuda:1") as refused:
        Timeline.create(device)
    assert (refused.value.code, refused.value.value) == (
        Code.NO_DEVICE,
        device if isinstance(device, str) else repr(device),
    )


@pytest.mark.parametrize("refused", ["visiting", "register_host", "host_device_pointer"])
def test_a_refused_timeline_leaves_no_descriptor(driver: RecordingDriver, refused: str) -> None:
    driver.failing = {refused}
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Failed, match=refused):
        Timeline.create("cuda")
    gc.collect()
    assert os.listdir("/proc/self/fd") == before
    registered = refused == "host_device_pointer"
    assert [name for name, _ in driver.calls] == ["cuMemHostUnregister"] * registered


def test_a_timeline_of_a_failed_gpu_is_closed(driver: RecordingDriver) -> None:
    timeline = Timeline.create("cuda")
    page = timeline.descriptor
    driver.failing = {"cuMemHostUnregister"}
    with pytest.raises(Failed):
        timeline.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(page)
    timeline.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("failing", ["", "drain"])
def test_a_dropped_timeline_leaves_no_descriptor_and_no_mapping(
    driver: RecordingDriver, device: str, failing: str
) -> None:
    """On a GPU it waits for its stream, which may still write. A failed GPU raises no error."""
    driver.failing = {failing}
    gc.collect()
    before, mapped = os.listdir("/proc/self/fd"), count_pages()
    timeline: Timeline | None = Timeline.create(device)
    assert os.listdir("/proc/self/fd") != before
    timeline = None
    gc.collect()
    assert timeline is None
    assert os.listdir("/proc/self/fd") == before
    assert count_pages() == mapped
    done = ["drain"] if failing else ["drain", "cuMemHostUnregister"]
    assert [name for name, *_ in driver.calls] == (done if device == "cuda" else [])
    assert driver.pages == [mapped + 1] * len(driver.calls)


def test_a_timeline_continues_in_a_new_page(driver: RecordingDriver) -> None:
    """A stream may still write to the revoked page, so it is released with the timeline."""
    timeline = Timeline.create("cuda")
    timeline.signal(7)
    timeline.revoke()
    page = timeline.descriptor
    driver.failing = {"register_host"}
    with pytest.raises(Failed):
        timeline.renew()
    assert (timeline.descriptor, timeline.revoked) == (page, True)
    driver.failing.clear()
    timeline.renew()
    timeline.signal(7)
    (_, _, first, *_), (_, _, second, value, _) = driver.calls
    assert first != second
    assert value == timeline.last == 2
    assert not timeline.revoked
    assert [name for name, *_ in driver.calls] == ["cuStreamWriteValue64_v2"] * 2
    driver.calls.clear()
    timeline.close()
    unregistered = [("cuMemHostUnregister", address) for address in (first, second)]
    assert sorted(driver.calls) == sorted(unregistered)


def test_a_timeline_of_the_cpu_follows_no_stream() -> None:
    timeline = Timeline.create()
    with pytest.raises(Refused, match="no stream") as refused:
        timeline.signal(SimpleNamespace(cuda_stream=7))
    assert refused.value.code == Code.DEVICE_MISMATCH
    assert (timeline.last, timeline.reached) == (0, 0)
    assert timeline.signal() == 1
    timeline.close()


@pytest.mark.parametrize("value", [0, 1, -1, 1 << 63, (1 << 64) + 5, 2.0, 2.5, "2"])
def test_an_invalid_value_is_refused(value: Any) -> None:
    """It changes nothing, and the next value follows the last valid one."""
    timeline = Timeline.create()
    assert timeline.signal() == 1
    with pytest.raises(Refused, match="from 2 to") as refused:
        timeline.signal(value=value)
    assert refused.value.code == Code.BAD_SPEC
    assert (timeline.last, timeline.reached) == (1, 1)
    assert timeline.signal() == timeline.reached == 2
    timeline.close()


def test_tensors_and_their_timeline_must_be_on_one_device(
    kvferryd: LocalDaemon, driver: RecordingDriver
) -> None:
    """The client refuses without a message to the daemon, and can register afterwards."""
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0))
    of_cpu, of_gpu = Timeline.create(), Timeline.create("cuda:0")
    shared = {"layer": shared_empty((8, 64))}
    with OffloadClient(kvferryd.directory) as client:
        for register in (
            lambda: client.register_kv_caches(
                CanonicalKVCaches(one_tensor(), (on_gpu,)), timeline=of_cpu
            ),
            lambda: client.register_kv_caches(shared, num_blocks=8, timeline=of_gpu),
            lambda: client.allocate_kv_caches(one_tensor(), timeline=of_gpu),
        ):
            with pytest.raises(Refused, match="use Timeline") as refused:
                register()
            assert refused.value.code == Code.DEVICE_MISMATCH
        assert client.status().errors == {}
        client.register_kv_caches(shared, num_blocks=8, timeline=of_cpu)
    of_cpu.close()
    of_gpu.close()


def test_vllm_continues_without_a_timeline(
    kvferryd: LocalDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    caches = kv_caches()
    caches.tensors[0].tensor = caches.tensors[0].tensor.to("meta")
    worker = WorkerSide(engine_config_at(kvferryd.directory), caches)
    assert "continues without offloading" in caplog.text
    worker.shutdown()
