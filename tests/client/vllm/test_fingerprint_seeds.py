"""The hash seed and the key size in a fingerprint: engines share only if their hashes agree."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvferry.client import Fingerprint
from kvferry.client.vllm.fingerprint import read_fingerprint
from support.fingerprint_helpers import BLOCKS, caches, read
from support.vllm_stand_ins import vllm_config


def engines(count: int = 2) -> list[Fingerprint]:
    return [
        read_fingerprint(vllm_config(f"engine {number}", {}), caches(), BLOCKS)
        for number in range(count)
    ]


@pytest.mark.parametrize("seed", ["0", ""])
def test_engines_with_other_ids_share(monkeypatch: pytest.MonkeyPatch, seed: str) -> None:
    """An empty seed is a seed."""
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    one, other = engines()
    assert one == other


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """hashing(seeds): vLLM resolves these seeds, in turn; None is a vLLM that resolves none."""

    def install(seeds: list[str] | None) -> None:
        functions, utils = ModuleType("vllm.utils.hashing"), ModuleType("kv_cache_utils")
        vars(functions)["get_hash_fn_by_name"] = lambda name: lambda data: bytes(32)
        if seeds is not None:
            vars(utils)["resolve_none_hash_seed"] = lambda function: seeds.pop(0)
        for name in ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.core"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "vllm.utils.hashing", functions)
        monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_utils", utils)
        monkeypatch.delenv("PYTHONHASHSEED")

    return install


@pytest.mark.parametrize("seeds", [None, ["a", "b", "c", "d"]])
def test_engines_with_random_seeds_do_not_share_and_are_warned(
    seeds: list[str] | None, hashing: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    hashing(seeds)
    one, other = engines()
    assert one != other
    assert "PYTHONHASHSEED=0" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_engines_with_vllms_default_seed_share(
    hashing: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Since 0.29 it is fixed for sha256."""
    hashing(["fixed"] * 4)
    one, other = engines()
    assert one == other
    assert one.hash_seed == "fixed"
    assert not caplog.text


@pytest.mark.parametrize(("algorithm", "size"), [("sha256", 36), ("xxhash_cbor", 20)])
def test_a_key_has_the_bytes_of_a_hash_and_of_a_group_index(algorithm: str, size: int) -> None:
    def change(config: Any) -> None:
        config.cache_config.prefix_caching_hash_algo = algorithm

    assert read(change=change).key_bytes == size


def test_vllms_own_functions_resolve_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    monkeypatch.delenv("PYTHONHASHSEED")
    default = getattr(utils, "DEFAULT_NONE_HASH_SEED", "of engine engine")
    assert read().hash_seed == default

    def xxhash(config: Any) -> None:
        config.cache_config.prefix_caching_hash_algo = "xxhash"

    assert read(change=xxhash).hash_seed == "of engine engine"
