"""Each option of kv_connector_extra_config with wrong values. No vLLM needed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import Code, Refused
from kvferry.client.engines.options import namespace_options, read_directories
from kvferry.client.vllm.options import check_options, sets_chunk

NAN, INFINITE = float("nan"), float("inf")
NUMBERS: tuple[Any, ...] = (
    "x",
    "",
    [1],
    {},
    True,
    NAN,
    INFINITE,
    -INFINITE,
    -1,
    1.5,
    1 << 60,
    "0x10",
    "1 2",
)
# Wrong values of each option, and words of the message.
WRONG: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cpu_bytes_to_use": (
        "cpu_bytes_to_use",
        ("64 apples", "", -1, True, False, [1 << 30], {}, NAN, INFINITE, 1e300, "64g", 0, 0.5, "0"),
    ),
    "eviction_policy": (
        "eviction_policy: .* use lru or arc or s3fifo",
        ("lfu", "arc ", " lru", "", None, 5, True, ["lru"], NAN),
    ),
    "store_threshold": ("store_threshold = .* set it to", NUMBERS),
    "block_size": ("block_size = .* set it to", (*NUMBERS, 0, -16)),
    "blocks_per_chunk": ("blocks_per_chunk = .* set it to", (*NUMBERS, 0, 4097)),
    "offload_prompt_only": (
        "offload_prompt_only = .* not true or false",
        ("false", "", None, 2, [], NAN),
    ),
    "kvferry_exported_kv": (
        "kvferry_exported_kv = .* not true or false",
        ("false", "", 0, 1, [], NAN),
    ),
    "kvferry_dirs": (
        "kvferry_dirs",
        (5, True, {}, "", " ", [""], [5], [None], ["/one", 5], NAN, "/a\0b", "/a" * 80),
    ),
    "kvferry_store": ("kvferry_store = .* not known; use 'auto'", ("now", True, 1, [], {}, NAN)),
    "kvferry_salt": ("kvferry_salt = ", (True, [], {}, ["a"], NAN, INFINITE, "x" * 257)),
    "kvferry_dir": ("use kvferry_dirs", ("/run/kvferry/cpu",)),
}
ROWS = [(key, value, words) for key, (words, values) in WRONG.items() for value in values]


@pytest.mark.parametrize(("key", "value", "message"), ROWS, ids=[f"{k}-{v!r}" for k, v, _ in ROWS])
def test_a_wrong_value_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        check_options({key: value})
    assert refused.value.code == Code.BAD_CONFIG


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("eviction_polcy", "eviction_policy"),
        ("cpu-bytes-to-use", "cpu_bytes_to_use"),
        ("STORE_THRESHOLD", "store_threshold"),
        ("blocksize", "block_size"),
        ("kvfery_salt", "kvferry_salt"),
    ],
)
def test_a_misspelled_key_is_refused(key: str, meant: str) -> None:
    with pytest.raises(Refused, match=rf"use {meant}\b") as refused:
        check_options({key: 1})
    assert refused.value.value == key


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"cpu_bytes_to_use_per_rank": 1, "num_cpu_blocks": 1, "lazy_offload": True, "tiers": []},
        {"spec_name": "KVFerrySpec", "block_size": 16, "kvferry_exported_kv": False},
        {"block_size": "32"},
        {"blocks_per_chunk": 4.0, "block_size": None},
        {"cpu_bytes_to_use": 6.87e10, "store_threshold": "2", "eviction_policy": "S3FIFO"},
        {"cpu_bytes_to_use": None, "store_threshold": None, "offload_prompt_only": 0},
        {"kvferry_dirs": None, "kvferry_salt": None, "kvferry_exported_kv": None},
        {"kvferry_store": None},
        {"kvferry_store": "at_eviction"},
        {"kvferry_dirs": [], "kvferry_salt": 5},
        {"kvferry_dirs": ["/a folder"], "kvferry_salt": 20.5},
    ],
)
def test_right_values_are_accepted(extra: dict[str, Any]) -> None:
    check_options(extra)


def test_only_one_key_sets_the_chunk() -> None:
    with pytest.raises(Refused, match="remove one of them"):
        check_options({"block_size": 64, "blocks_per_chunk": 4})
    assert sets_chunk({"block_size": 64})
    assert not sets_chunk({"block_size": None, "cpu_bytes_to_use": 1})


@pytest.mark.parametrize(("given", "used"), [(None, 1), (0, 1), (1, 1), ("3", 3), (2.0, 2)])
def test_a_threshold_of_0_is_vllms_default(given: Any, used: int) -> None:
    assert namespace_options({"store_threshold": given}, 1).get("store_threshold") == used


def test_a_policy_is_named_in_any_case() -> None:
    assert namespace_options({"eviction_policy": "LRU"}, 1).get("eviction_policy") == "lru"


# Directories


def test_there_is_a_directory_for_each_rank() -> None:
    assert read_directories({"kvferry_dirs": "/one"}, 1) == ("/one",)
    assert read_directories({"kvferry_dirs": ["/one", "/two"]}, 2) == ("/one", "/two")
    assert read_directories({}, 2) == ()
    with pytest.raises(Refused, match="too short for 3 ranks; write 3 directories"):
        read_directories({"kvferry_dirs": ["/one", "/two"]}, 3)
    with pytest.raises(Refused, match="too short for 2 ranks"):
        check_options({"kvferry_dirs": "/one"}, ranks=2)


def test_a_directory_may_have_no_daemon_yet_but_not_several(tmp_path: Path) -> None:
    assert read_directories({"kvferry_dirs": str(tmp_path / "later")}, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="not a runtime directory"):
        read_directories({"kvferry_dirs": str(tmp_path / "file")}, 1)
    for name in ("GPU-1", "GPU-2"):
        (tmp_path / name).mkdir()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / name / "kvferry.sock"))
    with pytest.raises(Refused, match="kvferry_dirs: 2 daemons run; name the directory of one"):
        read_directories({"kvferry_dirs": str(tmp_path)}, 1)
