"""Where an engine stands, and what its blocks are: read from a configuration. No vLLM needed."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.client import Code, Gone, Refused
from kvferry.client import vllm as package
from kvferry.client.vllm import engine_config as module
from kvferry.client.vllm.engine_config import (
    BlockSizes,
    EngineConfig,
    chunk_factor,
    provided_config,
    read_engine_config,
)
from kvferry.client.vllm.options import StoreMode
from support.vllm_stand_ins import vllm_config

TWO_MIB = 2 << 20
BLOCKS = BlockSizes((16,), 16, 1)


def caches(nbytes: int = TWO_MIB, groups: int = 1, stride: int = 0) -> Any:
    """`nbytes`: of a block of all groups."""
    tensors = [SimpleNamespace(size=nbytes // 2 * 10, block_stride=stride) for _ in range(2)]
    names = [SimpleNamespace(layer_names=["a", "b"]) for _ in range(groups)]
    return SimpleNamespace(num_blocks=10, kv_cache_tensors=tensors, kv_cache_groups=names)


def place(
    extra: dict[str, Any] | None = None, blocks: BlockSizes = BLOCKS, **parallel: Any
) -> EngineConfig:
    config = vllm_config("engine", extra or {})
    config.model_config.get_num_layers = lambda rank: 1
    vars(config.parallel_config).update(parallel)
    return read_engine_config(config, caches(), blocks)


# Chunks


@pytest.mark.parametrize(
    ("tokens", "nbytes", "factor"),
    [
        (16, TWO_MIB, 4),
        (16, 1 << 10, 4),
        (16, 3 << 20, 2),
        (16, 5 << 20, 1),
        (16, 64 << 20, 1),
        (8, 1 << 10, 8),
        (48, 1 << 10, 1),
        (64, 1 << 10, 1),
        (256, 1 << 10, 1),
    ],
)
def test_a_chunk_has_64_tokens_and_8_mib_at_most(tokens: int, nbytes: int, factor: int) -> None:
    blocks = BlockSizes((tokens,), tokens, 1)
    assert chunk_factor(vllm_config("engine", {}), caches(nbytes), blocks, full=True) == factor


def test_windows_groups_and_a_chunk_size_that_the_user_sets_are_kept() -> None:
    config = vllm_config("engine", {})
    assert chunk_factor(config, caches(), BLOCKS, full=False) == 1
    assert chunk_factor(config, caches(groups=2), BlockSizes((16, 16), 16, 1), full=True) == 1
    for extra in ({"block_size": 16}, {"blocks_per_chunk": 1}, {"blocks_per_chunk": 2}):
        said = BlockSizes((16,), 16, extra.get("blocks_per_chunk", 1))
        assert chunk_factor(vllm_config("engine", extra), caches(), said, full=True) == said.factor


def test_options_are_spelled_as_vllms() -> None:
    assert place().options == {
        "cpu_bytes_to_use": None,
        "eviction_policy": "lru",
        "store_threshold": 1,
    }
    extra = {"cpu_bytes_to_use": "10000000", "eviction_policy": "arc", "store_threshold": 0}
    assert place(extra, world_size=4).options == {
        "cpu_bytes_to_use": 2500000,
        "eviction_policy": "arc",
        "store_threshold": 1,
    }


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [("64GiB", 64 << 30), (float(1 << 36), 1 << 36), ("6.8719476736e+10", 1 << 36), (None, None)],
)
def test_sizes_are_written_as_for_the_daemon(said: Any, nbytes: int | None) -> None:
    assert place({"cpu_bytes_to_use": said}).options["cpu_bytes_to_use"] == nbytes


@pytest.mark.parametrize(("layers", "said"), [((31, 30), "31, 30 layers"), ((30, 30), "")])
def test_a_pipeline_of_uneven_ranks_is_told_once(
    layers: tuple[int, int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in range(4):
        config = vllm_config("engine", {})
        split = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "world_size": 4}
        vars(config.parallel_config).update(split, rank=rank)
        config.model_config.get_num_layers = lambda parallel: layers[
            parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
        ]
        read_engine_config(config, caches(), BLOCKS)
    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert len(errors) == bool(said)
    assert said in "".join(errors)


@pytest.mark.parametrize(
    ("said", "ranks", "message"),
    [
        (TWO_MIB - 1, 1, f"^.bad_config. cpu_bytes_to_use = 2097151: .* at least {TWO_MIB} bytes"),
        ("2MiB", 2, f"'2MiB' for 2 ranks: 1048576 bytes .* at least {TWO_MIB} bytes per rank"),
        (1, 4, "cpu_bytes_to_use = 1 for 4 ranks: 0 bytes"),
    ],
)
def test_memory_for_less_than_a_chunk_is_refused(said: Any, ranks: int, message: str) -> None:
    with pytest.raises(Refused, match=message):
        place({"cpu_bytes_to_use": said}, world_size=ranks)


@pytest.mark.parametrize(
    ("extra", "factor", "refused"),
    [
        ({"block_size": 8192}, 512, False),
        ({"block_size": 8208}, 513, True),
        ({"blocks_per_chunk": 4096}, 4096, True),
        ({"block_size": 16}, 1, False),
        ({}, 4, False),
    ],
)
def test_a_chunk_that_no_request_fills_is_refused(
    extra: dict[str, Any], factor: int, refused: bool
) -> None:
    """The model has a max_model_len of 8192."""
    blocks = BlockSizes((16,), 16, factor)
    if not refused:
        assert place(extra, blocks).factor == factor
        return
    with pytest.raises(Refused, match=f"{16 * factor} tokens .* set block_size to at most 8192"):
        place(extra, blocks)


def test_a_layout_whose_blocks_are_not_contiguous_is_refused() -> None:
    """vLLM's connector would copy one head of one layer."""
    kv_cache_config = caches()
    for layout in ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"):
        kv_cache_config.kv_cache_layout = layout
        read_engine_config(vllm_config("engine", {}), kv_cache_config, BLOCKS)
    kv_cache_config.kv_cache_layout = "LHBNC"
    with pytest.raises(Refused, match="VLLM_KV_CACHE_LAYOUT") as refused:
        read_engine_config(vllm_config("engine", {}), kv_cache_config, BLOCKS)
    assert (refused.value.code, refused.value.value) == (Code.BAD_CONFIG, "LHBNC")


# Daemons


def listen(folder: Path) -> None:
    """Leave a daemon's socket there."""
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "kvferry.sock"))


def test_folders_that_are_named_are_taken_one_a_rank() -> None:
    named = place({"kvferry_dirs": ["/one", "/two"]}, world_size=2)
    assert [named.for_rank(rank).find_daemon() for rank in (0, 1)] == [Path("/one"), Path("/two")]
    with pytest.raises(Gone, match="rank 2"):
        named.for_rank(2).find_daemon()
    assert place({"kvferry_dirs": "/one"}).find_daemon() == Path("/one")


def test_the_only_daemon_in_a_folder_that_is_named_is_taken(tmp_path: Path) -> None:
    listen(tmp_path / "GPU-1")
    assert place({"kvferry_dirs": str(tmp_path)}).find_daemon() == tmp_path / "GPU-1"


def test_else_it_is_the_daemon_of_the_ranks_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.proto.runtime_directory.SYSTEM_DIRECTORY", tmp_path)
    monkeypatch.setattr(module, "_uuid", "GPU-{}".format)
    for device in (2, 3):
        listen(tmp_path / f"GPU-{device}")
    replica = place(world_size=2, tensor_parallel_size=2, data_parallel_index=1)
    assert [replica.for_rank(rank).find_daemon().name for rank in (0, 1)] == ["GPU-2", "GPU-3"]
    # The UUID of the tensors' GPU, if known, is preferred.
    assert replica.for_rank(1).find_daemon("GPU-2").name == "GPU-2"
    with pytest.raises(Gone):
        place(world_size=2).for_rank(0).find_daemon()  # another GPU's will not do


def test_one_rank_takes_the_only_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.proto.runtime_directory.SYSTEM_DIRECTORY", tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("os.getuid", lambda: 1 << 30)
    monkeypatch.setattr(module, "_uuid", lambda device: None)
    listen(tmp_path / "cpu")
    assert place().find_daemon() == tmp_path / "cpu"


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
    engine = place(world_size=2, tensor_parallel_size=2, assigned_physical_gpu_ids=assigned)
    assert [str(engine.for_rank(rank).find_daemon()) for rank in (0, 1)] == found


# Without the connector, or without vLLM


def test_a_spec_needs_our_connector() -> None:
    with pytest.raises(Refused, match="KVFerryConnector") as refused:
        provided_config()
    assert refused.value.code == Code.BAD_CONFIG


def test_the_package_says_which_vllm_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvferry.client.vllm.connector", None)
    monkeypatch.setattr(package, "installed_version", lambda name: "0.11.0")
    with pytest.raises(Refused, match=package.SUPPORTED) as refused:
        _ = package.KVFerryConnector
    assert "0.11.0" in refused.value.value
    with pytest.raises(AttributeError):
        _ = package.Nothing


# When it stores


def store_mode(change: Callable[[Any], object] = lambda config: None, **extra: Any) -> StoreMode:
    config = vllm_config("engine", extra)
    change(config)
    config.model_config.get_num_layers = lambda rank: 1
    return read_engine_config(config, caches(), BLOCKS).store_mode


def test_it_stores_when_the_user_says() -> None:
    assert store_mode() is StoreMode.AUTO
    assert store_mode(kvferry_store="at_eviction") is StoreMode.AT_EVICTION


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config.kv_transfer_config, "kv_role", "kv_producer"),
        lambda config: setattr(config.cache_config, "enable_prefix_caching", False),
        lambda config: setattr(
            config, "kv_events_config", SimpleNamespace(enable_kv_cache_events=True)
        ),
    ],
)
def test_it_stores_at_once_if_others_need_the_blocks_or_the_gpu_keeps_none(
    change: Callable[[Any], object],
) -> None:
    assert store_mode(change, kvferry_store="at_eviction") is StoreMode.AT_ONCE
