"""Whether each field of vLLM's configuration changes the fingerprint: support/vllm_fields.py.

No vLLM needed. With vLLM, its classes must have no field that the table lacks.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.client.vllm.fingerprint import ENVIRONMENT, SPEC_FIELDS, read_fingerprint
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.version import installed_version
from support.fingerprint_helpers import BLOCKS, caches
from support.vllm_fields import ELSEWHERE, FIELDS, PAGE_FIELDS
from support.vllm_fields_outside import OWN_NAMESPACE, WHOLLY_OUTSIDE
from support.vllm_stand_ins import vllm_config

NEWEST = 33
# Values of an engine in which every field inside has an effect.
VALUES: dict[str, Any] = {
    "cache_config.use_replayssm": True,
    "cache_config.replayssm_buffer_len": 16,
    "model_config.hf_text_config.rope_parameters": {"rope_type": "longrope"},
    "model_config.max_model_len": 4096,
    "model_config.multimodal_config.video_pruning_rate": 0.5,
    "parallel_config.decode_context_parallel_size": 2,
    "parallel_config.dcp_kv_cache_interleave_size": 1,
    "parallel_config.cp_kv_cache_interleave_size": 1,
    "speculative_config.draft_model_config": SimpleNamespace(model="draft"),
}
OWN_FIELDS = {path for table in FIELDS.values() if (path := table.path) is not None}


def engine() -> Any:
    """A stand-in for a VllmConfig with every field of the table."""
    config = vllm_config("engine", {})
    config.instance_id = "start"
    config.model_config.hf_text_config = SimpleNamespace()
    for table in sorted(FIELDS.values(), key=lambda table: (table.path or "").count(".")):
        if not table.path:
            continue
        if find(config, table.path) is None:
            put(config, table.path, SimpleNamespace())
        for name in (*table.inside, *names(table.through.values())):
            path = f"{table.path}.{name.partition(':')[0]}"
            if find(config, path) is None and path not in OWN_FIELDS:
                put(config, path, None)
    for path, value in VALUES.items():
        put(config, path, value)
    return config


def find(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def put(config: Any, path: str, value: Any) -> None:
    holder, _, name = path.rpartition(".")
    setattr(find(config, holder) if holder else config, name, value)


def names(groups: Iterable[str]) -> Iterator[str]:
    for group in groups:
        yield from group.split()


def fingerprint(config: Any) -> Fingerprint:
    return read_fingerprint(config, caches(), BLOCKS)


def full_path(table: Any, name: str) -> str:
    name = name.partition(":")[0]
    return f"{table.path}.{name}" if table.path else name


INSIDE = {
    full_path(table, name): v for table in FIELDS.values() for name, v in table.inside.items()
}
OUTSIDE = [
    full_path(table, name)
    for table in FIELDS.values()
    if table.path is not None
    for name in names(table.outside.values())
] + [path for classes in WHOLLY_OUTSIDE.values() for path in classes.values()]


@pytest.mark.parametrize("path", INSIDE)
def test_a_field_inside_changes_the_fingerprint(path: str) -> None:
    config = engine()
    put(config, path, INSIDE[path])
    assert fingerprint(config).differences(fingerprint(engine()))


def test_fields_outside_do_not() -> None:
    config, expected = engine(), fingerprint(engine())
    for path in sorted(OUTSIDE, key=lambda path: -path.count(".")):  # parts first
        holder = path.rpartition(".")[0]
        if not holder or find(config, holder) is not None:
            put(config, path, "another")
    assert not fingerprint(config).differences(expected)


def versions(name: str) -> range:
    """The minor versions of vLLM that have the field."""
    bounds = name.partition(":")[2]
    first, _, last = bounds.partition("-")
    return range(int(first or 0), int(last or 1000) + 1)


def test_each_field_is_in_the_table_once() -> None:
    for table in FIELDS.values():
        groups = *table.through.values(), *table.outside.values()
        listed = [name.partition(":")[0] for name in (*table.inside, *names(groups))]
        assert len(listed) == len(set(listed))


# With vLLM


def dataclasses_of(module: Any) -> dict[str, set[str]]:
    classes = {
        name: cls
        for name, cls in vars(module).items()
        if isinstance(cls, type)
        and dataclasses.is_dataclass(cls)
        and cls.__module__ == module.__name__
    }
    return {
        name: {field.name for field in dataclasses.fields(cls)} for name, cls in classes.items()
    }


def test_the_table_names_all_fields_of_vllms_classes() -> None:
    """Does a new field change the bytes of KV? Read what vLLM does with it."""
    package = pytest.importorskip("vllm.config")
    version = re.match(r"0\.(\d+)", installed_version("vllm") or "")
    assert version
    minor = int(version[1])
    modules = [m.name for m in pkgutil.iter_modules(package.__path__, "vllm.config.")]
    real: dict[str, set[str]] = {}
    for module in modules:
        real |= dataclasses_of(importlib.import_module(module))
    wholly = {name for classes in WHOLLY_OUTSIDE.values() for name in classes}
    assert not real.keys() - FIELDS.keys() - ELSEWHERE - OWN_NAMESPACE - wholly
    for name in real.keys() & FIELDS.keys():
        table = FIELDS[name]
        groups = *table.through.values(), *table.outside.values()
        listed = (*table.inside, *names(groups))
        known = {entry.partition(":")[0] for entry in listed if minor in versions(entry)}
        assert not real[name] - known, name
        assert minor > NEWEST or known == real[name], name


def test_the_table_names_all_fields_of_vllms_pages() -> None:
    module = pytest.importorskip("vllm.v1.kv_cache_interface")
    known = {*SPEC_FIELDS, *names(PAGE_FIELDS.values())}
    for name, fields in dataclasses_of(module).items():
        assert not fields - known, name


def test_every_variable_that_sets_a_layout_is_known() -> None:
    envs = pytest.importorskip("vllm.envs")
    read_as_kv_layout, rocm_only = "VLLM_KV_CACHE_LAYOUT", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"
    known = {*ENVIRONMENT, read_as_kv_layout, rocm_only}
    assert not {name for name in envs.environment_variables if "LAYOUT" in name} - known
