"""The fingerprint of a server of SGLang. No SGLang needed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvferry.client.sglang.fingerprint import (
    ENVIRONMENT,
    FIELDS,
    PATHS,
    UNVERSIONED_FIELDS,
    UNVERSIONED_FORMATS,
    Rank,
    read_fingerprint,
)
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from support.sglang_fields import OUTSIDE

ONE_RANK = Rank(0, 1, "start")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def layout(nbytes: int = 4096, buffers: int = 2) -> KVLayout:
    refs = tuple(TensorRef(number, nbytes) for number in range(buffers))
    return KVLayout(tuple(TensorLayout(8, nbytes, nbytes) for _ in refs), (refs,))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def write_model(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def read(
    model: Path | str,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    extra: dict[str, Any] | None = None,
    rank: Rank = ONE_RANK,
    pages: KVLayout | None = None,
    tokens: int = 64,
    **more: Any,
) -> Fingerprint:
    server_args = SimpleNamespace(model_path=str(model), **options, **more)
    return read_fingerprint(server_args, pages or layout(), rank, tokens, extra or {})


def salt(fingerprint: Fingerprint) -> str:
    return dict(fingerprint.extra)["salt"]


@pytest.mark.parametrize(
    "field",
    [
        *("revision", "dtype", "kv_cache_dtype"),
        *[name for fields in FIELDS.values() for name in fields],
    ],
)
def test_each_option_changes_it(model: Path, field: str) -> None:
    assert read(model, {field: "one"}).name != read(model).name
    assert read(model, {field: "one"}).name != read(model, {field: "other"}).name
    assert read(model, {field: True}).name != read(model).name


@pytest.mark.parametrize("value", [None, "", False, {}, [], "auto"])
def test_an_option_that_is_not_set_does_not(model: Path, value: object) -> None:
    options = {name: value for fields in FIELDS.values() for name in fields}
    assert read(model, options) == read(model)


def test_options_that_change_no_kv_do_not(model: Path) -> None:
    for field in [name for names in OUTSIDE.values() for name in names.split()]:
        assert read(model, {field: "another"}) == read(model), field


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_each_variable_changes_it(
    model: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    names = {read(model).name}
    for value in ("1", "other"):
        monkeypatch.setenv(variable, value)
        names.add(read(model).name)
    assert len(names) == 3


def test_many_options_are_a_digest_that_fits(model: Path) -> None:
    options = {name: "x" * 40 for fields in FIELDS.values() for name in fields}
    found = read(model, options)
    assert found == msgspec.json.decode(msgspec.json.encode(found), type=Fingerprint)
    last = FIELDS["parallel"][-1]
    assert read(model, {**options, last: "y" * 40}).name != found.name


def test_pages_change_it(model: Path) -> None:
    pages = [layout(), layout(2048, 4), layout(8192, 1), layout(2048), layout(4096, 3)]
    names = {read(model, pages=each).name for each in pages}
    names.add(read(model, tokens=128).name)
    assert len(names) == 6
    more = KVLayout(
        tuple(TensorLayout(99, 4096, 8192) for _ in range(2)), layout().groups
    )  # the pool's size
    assert read(model, pages=more) == read(model)


def test_ranks_that_divide_kv_differ_and_replicated_ones_do_not(model: Path) -> None:
    one, two = read(model, rank=Rank(0, 2)), read(model, rank=Rank(1, 2))
    assert len({one.name, two.name, read(model).name}) == 3
    assert read(model, rank=Rank(0, 2, "a")) == one  # as each replicated rank is numbered


# Files


def test_weights_and_their_configuration_count(model: Path, tmp_path: Path) -> None:
    """Also those of a drafting model."""
    names = {read(model).name}
    (model / "model.safetensors").write_bytes(b"others!")
    names.add(read(model).name)
    (model / "config.json").write_text('{"rope_theta": 1}')
    names.add(read(model).name)
    (model / "README.md").write_text("text")
    assert read(model).name in names
    draft = write_model(tmp_path / "draft")
    options = {"speculative_draft_model_path": str(draft)}
    assert salt(read(model, options)) == ""
    names.add(read(model, options).name)
    (draft / "model.safetensors").write_bytes(b"others!")
    names.add(read(model, options).name)
    assert len(names) == 5


@pytest.mark.parametrize("field", PATHS)
def test_a_path_counts_by_its_files(model: Path, tmp_path: Path, field: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
        (directory / "scales.yaml").write_text("1")  # a suffix that no model has
    there = {field: str(first / "scales.yaml")}
    found = read(model, there)
    assert found.name != read(model).name
    assert read(model, {field: str(second / "scales.yaml")}) == found
    (first / "scales.yaml").write_text("2")
    assert read(model, there).name != found.name
    found = read(model, {field: str(first)})
    (first / "model.safetensors").write_bytes(b"weights")
    assert read(model, {field: str(first)}).name != found.name


def test_a_snapshot_in_the_hubs_cache_is_named_by_its_model_and_commit(model: Path) -> None:
    one, two = [read(f"{cache}/models--org--m/snapshots/{COMMIT}") for cache in ("/a", "/b/c")]
    assert (one, one.model, salt(one)) == (two, "org/m", "")
    assert read(f"/a/models--org--m/snapshots/{COMMIT[::-1]}").name != one.name
    assert salt(read("org/no-such-model", revision=COMMIT)) == ""
    names = {read(model, uno_lora_path=name).name for name in ("org/one", "org/two", None)}
    snapshots = [f"{cache}/models--org--one/snapshots/{COMMIT}" for cache in ("/a", "/b")]
    one, same = [read(model, uno_lora_path=path) for path in snapshots]
    assert one == same
    assert len({*names, one.name}) == 4


# Salts


def test_a_users_salt_changes_it_and_replaces_that_of_a_start(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    salts = None, "one", "two", 3
    assert len({read(model, extra={"kvferry_salt": each}).name for each in salts}) == 4
    assert read(model, extra={"kvferry_salt": " "}) == read(model)
    found = read(model, extra={"kvferry_salt": "mine"}, enable_lora=True)
    other = Rank(0, 1, "other start")
    assert read(model, extra={"kvferry_salt": "mine"}, enable_lora=True, rank=other) == found
    assert not caplog.records


UNKNOWN: dict[str, dict[str, Any]] = {
    "LoRA": {"enable_lora": True},
    "adapters": {"lora_paths": ["a=b"]},
    "bucket": {"model_path": "s3://bucket/model"},
    "hub without a commit": {"model_path": "org/no-such-model"},
    "hub with a branch": {"model_path": "org/no-such-model", "revision": "main"},
    "drafting model of the hub": {"speculative_draft_model_path": "org/no-such-model"},
    **{name: {"load_format": name} for name in sorted(UNVERSIONED_FORMATS)},
    **{name: {name: ["mine"]} for name in UNVERSIONED_FIELDS},
}


@pytest.mark.parametrize("options", UNKNOWN.values(), ids=UNKNOWN)
def test_what_cannot_be_identified_is_of_this_start(
    model: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"model_path": str(model), **options}
    path = options.pop("model_path")
    with caplog.at_level(logging.WARNING, "kvferry"):
        found = read(path, options)
    assert "kvferry_salt" in caplog.text
    assert salt(found) == "of this start start"
    assert read(path, options, rank=Rank(0, 1, "start")) == found
    assert read(path, options, rank=Rank(0, 1, "other start")).name != found.name


def test_ranks_of_one_start_have_its_salt(model: Path) -> None:
    ranks = [read(model, rank=Rank(n, 2, "start"), load_format="dummy") for n in range(2)]
    assert {salt(rank) for rank in ranks} == {"of this start start"}
    assert ranks[0].name != ranks[1].name
    assert msgspec.structs.replace(ranks[1], rank=0) == ranks[0]
