"""Which device the daemon uses, by the names that CUDA and nvidia-smi have for it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvferry.daemon.engine.cuda import cuda_engine
from kvferry.daemon.engine.cuda.cuda_engine import CudaEngine, CudaOptions, _find_device
from kvferry.proto.errors import Code, Refused

UUIDS = (
    "GPU-377e0049-554c-540b-93c6-d0976f8426cb",
    "GPU-377e1149-554c-540b-93c6-d0976f8426cb",
)


class Devices:
    """As a driver: two GPUs, or two MIG instances, of which cuDeviceGetUuid_v2 gives the UUIDs."""

    version = 1 << 20

    def device_count(self) -> int:
        return len(UUIDS)

    def device_uuid(self, ordinal: int) -> str:
        return UUIDS[ordinal]


DRIVER: Any = Devices()


@pytest.mark.parametrize(
    ("wanted", "ordinal"),
    [
        ("1", 1),
        *((uuid, ordinal) for ordinal, uuid in enumerate(UUIDS)),
        ("GPU-377e1", 1),
        ("gpu-377E0", 0),
        (UUIDS[1].replace("GPU", "MIG"), 1),
        ("MIG-377e0049", 0),
    ],
)
def test_a_device_has_an_index_and_a_uuid_that_may_be_shortened(wanted: str, ordinal: int) -> None:
    assert _find_device(DRIVER, wanted) == ordinal


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("2", "unknown device '2'"),
        ("GPU-377e2", "unknown device"),
        ("MIG-GPU-377e0049/1/0", "unknown device"),  # of drivers before 470
        ("GPU-377e", "beginning of GPU-377e0049.*, GPU-377e1149.*; write more of the UUID"),
    ],
)
def test_an_unknown_or_ambiguous_device_is_refused(wanted: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        _find_device(DRIVER, wanted)
    assert (refused.value.code, refused.value.value) == (Code.NO_DEVICE, wanted)


@pytest.mark.parametrize(("device", "visible"), [("mig-1f", "MIG-1f"), ("GPU-1f", "")])
def test_the_driver_is_told_the_mig_instance_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str
) -> None:
    """It shows a process one instance: this one, or the first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen = []

    def load() -> Any:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return DRIVER

    monkeypatch.setattr(cuda_engine, "driver", load)
    with pytest.raises(Refused):
        CudaEngine(device, CudaOptions("auto", 64 << 20, 1 << 20))
    assert seen == [visible]
