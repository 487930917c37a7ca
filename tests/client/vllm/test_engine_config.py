"""Where an engine stands, and what its blocks are: read from a configuration. No vLLM needed."""

from __future__ import annotations

import logging
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.client import Code, Fingerprint, Gone, Refused
from kvferry.client import vllm as package
from kvferry.client.validation import check_fields
from kvferry.client.vllm import engine_config as module
from kvferry.client.vllm import model
from kvferry.client.vllm.engine_config import (
    BlockSizes,
    EngineConfig,
    chunk_factor,
    provided_config,
    read_engine_config,
)
from kvferry.proto.messages import OpenNamespace
from support.vllm_stand_ins import engine_config_at, vllm_config

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


def test_whatever_the_user_says_of_chunks_holds() -> None:
    for extra in ({"block_size": 16}, {"blocks_per_chunk": 1}, {"blocks_per_chunk": 2}):
        said = BlockSizes((16,), 16, extra.get("blocks_per_chunk", 1))
        assert chunk_factor(vllm_config("engine", extra), caches(), said, full=True) == said.factor


def test_windows_and_groups_keep_vllms_chunk() -> None:
    config = vllm_config("engine", {})
    assert chunk_factor(config, caches(), BLOCKS, full=False) == 1
    assert chunk_factor(config, caches(groups=2), BlockSizes((16, 16), 16, 1), full=True) == 1


# Fingerprints


def test_the_room_of_a_host_block() -> None:
    assert place(blocks=replace(BLOCKS, factor=4)).fingerprint.host_block_bytes == 4 * TWO_MIB
    packed = read_engine_config(vllm_config("engine", {}), caches(stride=1), BLOCKS)
    assert packed.fingerprint.host_block_bytes == TWO_MIB // 2


@pytest.mark.parametrize(
    "other",
    [
        {"blocks": replace(BLOCKS, factor=4)},
        {"blocks": BlockSizes((32,), 16, 1)},
        {"rank": 1, "world_size": 2},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"cp_kv_cache_interleave_size": 16},
        {"dcp_kv_cache_interleave_size": 16},
    ],
)
def test_what_makes_bytes_differ_is_in_the_fingerprint(other: dict[str, Any]) -> None:
    assert place(**other).fingerprint.name != place().fingerprint.name


def test_a_word_that_vllm_writes_late_over_another_changes_nothing() -> None:
    before = place(dcp_kv_cache_interleave_size=16)
    after = place(dcp_kv_cache_interleave_size=16, cp_kv_cache_interleave_size=16)
    assert before.fingerprint == after.fingerprint


def kept_as(said: str, *specs: Any) -> Fingerprint:
    """Of groups of these specs, where vLLM's cache_dtype says so in this process."""
    config, kv_cache_config = vllm_config("engine", {}), caches(groups=len(specs))
    config.cache_config.cache_dtype = said
    for group, spec in zip(kv_cache_config.kv_cache_groups, specs, strict=True):
        group.kv_cache_spec = spec
    return read_engine_config(config, kv_cache_config, BLOCKS).fingerprint


FP8 = SimpleNamespace(dtype="torch.uint8")
SPARSE = SimpleNamespace(dtype="torch.uint8", cache_dtype_str="fp8_ds_mla")
BF16 = SimpleNamespace(dtype="torch.bfloat16")


@pytest.mark.parametrize(
    ("scheduler", "worker", "spec"), [("auto", "fp8", FP8), ("fp8", "fp8_ds_mla", SPARSE)]
)
def test_what_layers_make_of_the_cache_dtype_is_the_same_on_both_sides(
    scheduler: str, worker: str, spec: Any
) -> None:
    """vLLM's layers write it into the configuration of their process, a worker's."""
    assert kept_as(scheduler, spec) == kept_as(worker, spec)
    of_layers = SimpleNamespace(kv_cache_specs={"a": spec, "b": BF16})
    assert kept_as(scheduler, spec) == kept_as(worker, of_layers)


def test_what_kv_is_kept_as_is_in_the_fingerprint() -> None:
    states = (SimpleNamespace(dtypes=(of, of)) for of in ("torch.float32", "torch.bfloat16"))
    kinds = [kept_as("fp8_e5m2", BF16, one) for one in states]
    kinds += [kept_as("auto", one) for one in (BF16, FP8, SPARSE)]
    kinds += [kept_as(said, FP8) for said in ("fp8_e5m2", "nvfp4")]
    assert len({fingerprint.name for fingerprint in kinds}) == len(kinds)


def test_engines_of_another_id_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    one, other = (
        read_engine_config(vllm_config(name, {}), caches(), BLOCKS) for name in ("one", "two")
    )
    assert one.fingerprint == other.fingerprint
    assert one.engine != other.engine


def test_without_a_seed_they_do_not_and_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    one, other = (
        read_engine_config(vllm_config(name, {}), caches(), BLOCKS) for name in ("one", "two")
    )
    assert one.fingerprint != other.fingerprint
    assert "PYTHONHASHSEED=0" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize(("algorithm", "size"), [("sha256", 36), ("xxhash_cbor", 20)])
def test_keys_are_as_long_as_the_hash_and_a_group(algorithm: str, size: int) -> None:
    config = vllm_config("engine", {})
    config.cache_config.prefix_caching_hash_algo = algorithm
    assert read_engine_config(config, caches(), BLOCKS).fingerprint.key_bytes == size


def test_options_are_spelled_as_vllms() -> None:
    assert place().options == {
        "cpu_bytes_to_use": None,
        "eviction_policy": "lru",
        "store_threshold": 1,
    }
    extra = {"cpu_bytes_to_use": "1000", "eviction_policy": "arc", "store_threshold": 0}
    assert place(extra, world_size=4).options == {
        "cpu_bytes_to_use": 250,
        "eviction_policy": "arc",
        "store_threshold": 1,
    }


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [("64GiB", 64 << 30), ("1.5 GiB", 3 << 29), (float(1 << 36), 1 << 36), (0, 0), (None, None)],
)
def test_sizes_are_written_as_for_the_daemon(said: Any, nbytes: int | None) -> None:
    assert place({"cpu_bytes_to_use": said}).options["cpu_bytes_to_use"] == nbytes


@pytest.mark.parametrize("said", ["64 apples", "", -1, True, [1 << 30], float("nan"), 1e300])
def test_what_is_no_size_is_refused_by_name(said: Any) -> None:
    with pytest.raises(Refused, match=r"cpu_bytes_to_use.*64GiB") as refused:
        place({"cpu_bytes_to_use": said})
    assert refused.value.code == Code.BAD_CONFIG


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


# What a model computes with


def other_place(path: str = "", value: Any = None, **extra: Any) -> EngineConfig:
    """With another value at a path of vLLM's configuration."""
    config = vllm_config("engine", extra)
    config.instance_id = "start"
    config.model_config.hf_config = SimpleNamespace(_commit_hash="aaaa")
    config.model_config.hf_text_config = SimpleNamespace(rope_parameters={"rope_type": "longrope"})
    config.model_config.max_model_len = 4096
    config.model_config.multimodal_config = SimpleNamespace(mm_processor_kwargs=None)
    config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(model="draft"))
    if path:
        *names, last = path.split(".")
        target = config
        for name in names:
            target = getattr(target, name)
        setattr(target, last, value)
    return read_engine_config(config, caches(), BLOCKS)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.hf_config._commit_hash", "bbbb"),
        ("model_config.hf_overrides", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        ("model_config.hf_overrides", print),
        ("model_config.hf_config_path", "another"),
        ("model_config.max_model_len", 8192),
        ("model_config.quantization_config", {"linear": "fp8_per_token"}),
        ("model_config.multimodal_config.mm_processor_kwargs", {"max_pixels": 50176}),
        ("model_config.multimodal_config.video_pruning_rate", 0.5),
        ("model_config.multimodal_config.mm_encoder_attn_dtype", "fp8"),
        ("model_config.multimodal_config.mm_encoder_fp8_scale_path", __file__),
        ("use_v2_model_runner", True),  # the first one keeps all layers of a head together
        ("cache_config.kv_cache_dtype_skip_layers", [*map(str, range(99))]),
        ("cache_config.calculate_kv_scales", True),
        ("lora_config", SimpleNamespace()),
        ("speculative_config", None),
        ("speculative_config.draft_model_config.model", "another"),
        ("speculative_config.draft_model_config.hf_overrides", {"num_hidden_layers": 2}),
    ],
)
def test_what_a_model_computes_with_is_in_the_fingerprint(path: str, value: Any) -> None:
    other = other_place(path, value).fingerprint
    assert other.differences(other_place().fingerprint)
    assert other == other_place(path, value).fingerprint  # workers read it as the scheduler does
    check_fields(OpenNamespace, fingerprint=other)


def test_files_of_a_local_model_that_change_are_another_model(tmp_path: Path) -> None:
    def now() -> Fingerprint:
        return other_place("model_config.model", str(tmp_path)).fingerprint

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    (tmp_path / "README.md").write_text("one")
    one = now()
    (tmp_path / "README.md").write_text("another")
    assert now() == one
    weights.write_bytes(b"two")
    assert now() != one
    assert other_place("model_config.model", str(weights)).fingerprint.differences(one)


def test_a_configuration_that_is_written_anew_and_says_the_same_is_the_same(tmp_path: Path) -> None:
    """As a start of an engine may do; of a large file only the time tells."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"one")
    os.truncate(tmp_path / "model.safetensors", model.MAX_HASHED_BYTES + 1)
    one = other_place("model_config.model", str(tmp_path)).fingerprint
    os.utime(tmp_path / "config.json", ns=(1, 1))
    assert other_place("model_config.model", str(tmp_path)).fingerprint == one
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert other_place("model_config.model", str(tmp_path)).fingerprint != one


def test_a_file_that_cannot_be_read_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/proc/self/mem")  # nothing is at its beginning
    other_place("model_config.model", str(tmp_path))


@pytest.mark.parametrize("path", ["cache_config.calculate_kv_scales", "lora_config"])
def test_what_another_start_may_not_have_the_same_is_of_this_start(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    def started(when: str, **extra: Any) -> Fingerprint:
        config = vllm_config("engine", extra)
        config.instance_id = when
        holder, _, name = path.rpartition(".")
        setattr(getattr(config, holder) if holder else config, name, True)
        return read_engine_config(config, caches(), BLOCKS).fingerprint

    assert started("one") != started("two")
    assert "kvferry_salt" in caplog.text
    caplog.clear()
    assert started("one", kvferry_salt="mine") == started("two", kvferry_salt="mine")
    assert started("one", kvferry_salt="mine") != started("one", kvferry_salt="yours")
    assert "kvferry_salt" not in caplog.text


def test_a_model_may_write_into_its_configuration_when_it_is_made() -> None:
    """Workers' have; the scheduler's has not."""
    made = SimpleNamespace(_commit_hash="aaaa", rope_parameters={"rope_theta": 10000})
    worker = other_place("model_config.hf_config", made).fingerprint
    assert worker == other_place().fingerprint


def test_a_key_of_ours_that_there_is_not_is_refused() -> None:
    with pytest.raises(Refused, match="kvferry_dirs") as refused:
        place({"kvferry_dir": "/run/kvferry/cpu"})
    assert (refused.value.code, refused.value.value) == (Code.BAD_CONFIG, "kvferry_dir")
    vllms = {"spec_name": "KVFerrySpec", "spec_module_path": "kvferry.client.vllm", "other": 1}
    assert place(vllms).options == place().options


# Daemons


def listen(folder: Path) -> None:
    """Leave a daemon's socket there."""
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "kvferry.sock"))


def test_folders_that_are_named_are_taken_one_a_rank() -> None:
    named = place({"kvferry_dirs": ["/one", "/two"]}, world_size=3)
    assert [named.for_rank(rank).find_daemon() for rank in (0, 1)] == [Path("/one"), Path("/two")]
    with pytest.raises(Gone, match="rank 2"):
        named.for_rank(2).find_daemon()
    assert place({"kvferry_dirs": "/one"}).find_daemon() == Path("/one")


def test_else_it_is_the_daemon_of_the_ranks_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.proto.runtime_directory.SYSTEM_DIRECTORY", tmp_path)
    monkeypatch.setattr(module, "_uuid", "GPU-{}".format)
    for device in (2, 3):
        listen(tmp_path / f"GPU-{device}")
    replica = place(world_size=2, tensor_parallel_size=2, data_parallel_index=1)
    assert [replica.for_rank(rank).find_daemon().name for rank in (0, 1)] == ["GPU-2", "GPU-3"]
    assert (
        replica.for_rank(1).find_daemon("GPU-2").name == "GPU-2"
    )  # whoever has the tensors knows better
    with pytest.raises(Gone):
        place(world_size=2).for_rank(0).find_daemon()  # another GPU's will not do


def test_one_rank_takes_the_only_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.proto.runtime_directory.SYSTEM_DIRECTORY", tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("os.getuid", lambda: 1 << 30)
    monkeypatch.setattr(module, "_uuid", lambda device: None)
    listen(tmp_path / "cpu")
    assert place().find_daemon() == tmp_path / "cpu"


# What is not there


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


def test_a_place_of_another_rank_is_the_same_engine() -> None:
    assert engine_config_at("/one").for_rank(1).engine == engine_config_at("/one").engine
