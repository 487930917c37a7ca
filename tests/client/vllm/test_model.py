"""Fields that tell the weights of an engine from others of the same name. No vLLM needed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.client.engines import model_files
from kvferry.client.vllm import model as module
from support.vllm_stand_ins import vllm_config


def traits(start: str, changes: dict[str, Any], **extra: Any) -> dict[str, str]:
    """Of an engine that was started so, with other values at paths of vLLM's configuration."""
    config = vllm_config("engine", extra)
    config.instance_id = start
    config.load_config = SimpleNamespace(load_format="auto")
    for path, value in changes.items():
        *names, last = path.split(".")
        target = config
        for name in names:
            target = getattr(target, name)
        setattr(target, last, value)
    return dict(module.model_fields(config))


NO_COMMIT = {"model_config.hf_config": SimpleNamespace(_commit_hash=None)}


@pytest.mark.parametrize(
    "changes",
    [
        NO_COMMIT,
        {**NO_COMMIT, "model_config.revision": "v1.0"},
        {"model_config.hf_config_path": "another"},
        {"model_config.model": "HERE", "model_config.model_weights": "s3://bucket/model"},
        {"model_config.model": "HERE", "load_config.load_format": "tensorizer"},
        {"weight_transfer_config": SimpleNamespace(backend="nccl")},
        {"cache_config.calculate_kv_scales": True},
        {"lora_config": True},
        {"model_config.enable_sleep_mode": True},
    ],
)
def test_what_nothing_tells_from_others_is_of_this_start(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights in object storage, without a commit, or sent to a running engine, for example."""
    changes = {path: tmp_path if one == "HERE" else one for path, one in changes.items()}
    for unset in ({}, *({"kvferry_salt": salt} for salt in (None, "", " \n"))):
        caplog.clear()
        assert traits("one", changes, **unset) != traits("two", changes, **unset)
        assert "kvferry_salt" in caplog.text
    assert traits("one", changes) == traits("one", changes)  # workers', and the scheduler's
    caplog.clear()
    mine = traits("one", changes, kvferry_salt="mine")
    assert mine == traits("two", changes, kvferry_salt="mine")
    assert mine != traits("one", changes, kvferry_salt="yours")
    assert not caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**NO_COMMIT, "model_config.revision": "0123456789abcdef" * 2 + "01234567"},
        {**NO_COMMIT, "model_config.model": "HERE"},
        {"model_config.model_weights": "", "weight_transfer_config": None},
    ],
)
def test_weights_of_a_commit_or_in_files_are_found_again(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {path: tmp_path if one == "HERE" else one for path, one in changes.items()}
    assert traits("one", changes) == traits("two", changes)
    assert not caplog.text


def test_weights_in_the_hubs_cache_are_identified_by_content(tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE vLLM's model is a folder of links, whose files a new machine has anew."""
    (tmp_path / "blobs").mkdir()
    link = tmp_path / "snapshots" / "aaaa" / "model.safetensors"
    link.parent.mkdir(parents=True)

    def now(blob: str, at: int) -> dict[str, str]:
        file = tmp_path / "blobs" / blob
        file.touch()
        os.truncate(file, model_files.MAX_HASHED_BYTES + 1)
        os.utime(file, ns=(at, at))
        link.unlink(missing_ok=True)
        link.symlink_to(file)
        return traits("start", {"model_config.model": link.parent})

    assert now("a" * 64, 1) == now("a" * 64, 2)
    assert now("a" * 64, 1) != now("b" * 64, 1)
    assert now("mine", 1) != now("mine", 2)


def test_files_of_a_local_model_that_change_are_another_model(tmp_path: Path) -> None:
    """A small one may be written again with the same bytes, as a start of an engine may do."""

    def now() -> dict[str, str]:
        return traits("start", {"model_config.model": tmp_path})

    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    for name in (weights, config, tmp_path / "README.md"):
        name.write_bytes(b"one")
    one = now()
    (tmp_path / "README.md").write_text("another")
    os.utime(config, ns=(1, 1))
    assert now() == one
    weights.write_bytes(b"two")
    assert now() != one
    assert traits("start", {"model_config.model": weights}) != one
    os.truncate(weights, model_files.MAX_HASHED_BYTES + 1)
    one = now()
    os.utime(weights, ns=(1, 1))
    assert now() != one


def test_a_file_that_cannot_be_read_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/proc/self/mem")  # nothing is at its beginning
    traits("start", {"model_config.model": tmp_path})


@pytest.mark.parametrize("header", [b"", (5000).to_bytes(8, "little") + b" " * 5000, b"\xff" * 8])
def test_large_files_of_equal_size_and_time_differ_by_their_data(
    header: bytes, tmp_path: Path
) -> None:
    """As in images built with SOURCE_DATE_EPOCH. Their headers and their last bytes are equal."""
    file = tmp_path / "model.safetensors"
    found = []
    for weights in (b"A", b"B", b"A"):
        middle = weights * (1 << 20)
        file.write_bytes(header + b"=" * 8192)
        with file.open("r+b") as opened:
            for at in range(1 << 20, model_files.MAX_HASHED_BYTES, 1 << 20):
                opened.seek(at)
                opened.write(middle)
            opened.truncate(model_files.MAX_HASHED_BYTES + (8 << 20))
        os.utime(file, ns=(1, 1))
        found.append(traits("one", {"model_config.model": tmp_path}))
    assert found[0] != found[1]
    assert found[0] == found[2]
