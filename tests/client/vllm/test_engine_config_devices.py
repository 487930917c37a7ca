"""Which GPU is a rank's, as the scheduler sees it. No vLLM needed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.client.vllm import engine_config as module
from kvferry.client.vllm.engine_config import BlockSizes, read_engine_config
from support.vllm_stand_ins import vllm_config


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> Any:
    """see(devices): vLLM's platform in a process that CUDA_VISIBLE_DEVICES shows these; () all."""

    def platform(devices: tuple[int, ...]) -> None:
        def physical(device: int) -> int:
            return devices[device] if devices else device

        vllm = ModuleType("vllm.platforms")
        vars(vllm)["current_platform"] = SimpleNamespace(
            device_id_to_physical_device_id=physical,
            get_device_uuid=lambda device: f"GPU-{physical(device)}",
            get_device_capability=lambda: None,
        )
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.platforms", vllm)
        monkeypatch.setattr(module, "find_daemon", lambda uuid=None: Path(str(uuid)))

    return platform


@pytest.mark.parametrize(
    ("visible", "found"),
    [("GPU-377e, MIG-1f", ["GPU-377e", "MIG-1f"]), ("0,MIG-1f", ["GPU-0", "MIG-1f"])],
)
def test_uuids_in_the_environment_are_used_as_they_are(
    see: Any, monkeypatch: pytest.MonkeyPatch, visible: str, found: list[str]
) -> None:
    """NVML gives the UUID of the GPU that has the instance, and knows no shortened UUID."""
    see(())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [module._uuid(device) for device in range(2)] == found


@pytest.mark.parametrize(
    ("visible", "assigned", "found"),
    [
        ((), None, ["GPU-0", "GPU-1"]),
        ((), [5, 4], ["GPU-5", "GPU-4"]),
        ((6, 7), None, ["GPU-6", "GPU-7"]),
        ((4, 5, 6, 7), [7, 5], ["GPU-7", "GPU-5"]),
        ((6, 7), [5, 4], ["None", "None"]),  # which no engine does
    ],
)
def test_a_rank_has_the_device_that_vllm_was_told(
    see: Any, visible: tuple[int, ...], assigned: list[int] | None, found: list[str]
) -> None:
    """By --device-ids, of which only workers tell their platform."""
    see(visible)
    config = vllm_config("engine", {})
    sizes = {"world_size": 2, "tensor_parallel_size": 2}
    vars(config.parallel_config).update(sizes, assigned_physical_gpu_ids=assigned)
    caches = SimpleNamespace(
        num_blocks=1,
        kv_cache_tensors=[SimpleNamespace(size=4096, block_stride=0)],
        kv_cache_groups=[SimpleNamespace(layer_names=["a"])],
    )
    place = read_engine_config(config, caches, BlockSizes((16,), 16, 1))
    assert [str(place.for_rank(rank).find_daemon()) for rank in (0, 1)] == found
