"""kvferry refuses what it cannot serve in SGLang, and says what to change. No SGLang needed."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import kvferry.client.sglang
from kvferry.client import Refused
from kvferry.client.sglang import SUPPORTED, supported
from kvferry.client.sglang.supported import EXCLUDED, KEYS, SIGNATURES, SINGLE
from kvferry.proto.errors import Code

InstallVersion = Callable[[str | None], None]


def interface(signatures: dict[str, tuple[str, ...]]) -> type:
    """A class as SGLang's UnifiedCacheLinker, whose methods have these parameters."""
    methods = {}
    for name, parameters in signatures.items():
        defined: dict[str, Any] = {}
        exec(f"def {name}({', '.join(('self', *parameters))}): ...", defined)
        methods[name] = abstractmethod(defined[name])
    return type("UnifiedCacheLinker", (ABC,), methods)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> InstallVersion:
    """install(version): SGLang has this version."""

    def install(version: str | None) -> None:
        monkeypatch.setattr(supported, "installed_version", lambda name: version)

    return install


def version_refusal(signatures: dict[str, tuple[str, ...]]) -> str:
    with pytest.raises(Refused) as refused:
        supported.check_version(interface(signatures))
    assert refused.value.code == Code.BAD_CONFIG
    return str(refused.value)


@pytest.mark.parametrize("version", [SUPPORTED, f"{SUPPORTED}.post1", f"{SUPPORTED}+cu129"])
def test_the_supported_version_is_accepted(install: InstallVersion, version: str) -> None:
    install(version)
    supported.check_version(interface(SIGNATURES))
    supported.check_version()


@pytest.mark.parametrize("version", ["0.5.22", "0.5.230", "0.5.2", "0.6.0", "1.0.5.23", None])
def test_another_version_is_refused(install: InstallVersion, version: str | None) -> None:
    install(version)
    message = version_refusal(SIGNATURES)
    with pytest.raises(Refused, match=re.escape(message)):
        supported.check_version()
    assert (version or "an unknown version") in message
    assert f"pip install 'sglang=={SUPPORTED}'" in message


MOVED: dict[str, dict[str, tuple[str, ...]]] = {
    "offload": {**SIGNATURES, "offload": ("transfers",)},
    "load": {**SIGNATURES, "load": ("rid", "transfers", "priority")},
    "prefetch": {**SIGNATURES, "prefetch": ("rid",)},
    "close": {name: found for name, found in SIGNATURES.items() if name != "close"},
    ", ".join(sorted(SIGNATURES)): {},
}


@pytest.mark.parametrize("name", MOVED)
def test_a_moved_interface_is_refused(install: InstallVersion, name: str) -> None:
    install(SUPPORTED)
    assert f"differ in {name})" in version_refusal(MOVED[name])


def test_without_sglang_the_linker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvferry.client.sglang.linker", None)  # cannot be imported
    monkeypatch.setattr(kvferry.client.sglang, "installed_version", lambda name: None)
    with pytest.raises(Refused, match=r"it is not installed.*pip install 'sglang=="):
        _ = kvferry.client.sglang.KVFerryLinker
    with pytest.raises(AttributeError, match="Linker"):
        _ = kvferry.client.sglang.Linker


# Options


def config_refusal(
    extra: dict[str, Any] | None = None,
    *,
    options: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    ranks: int = 1,
) -> str:
    """The message, or nothing if the configuration is accepted."""
    server_args = SimpleNamespace(**{**dict.fromkeys(EXCLUDED, False), **(options or {})})
    try:
        supported.check_config(server_args, SimpleNamespace(**(params or {})), ranks, extra or {})
    except Refused as error:
        return str(error)
    return ""


def test_a_plain_server_is_accepted() -> None:
    every: dict[str, Any] = {
        "kvferry_dirs": ["/run/kvferry/cpu"],
        "kvferry_salt": "mine",
        "kvferry_pack": "on",
        "cpu_bytes_to_use": "64GiB",
        "eviction_policy": "arc",
        "store_threshold": 2,
    }
    assert {*every} == {*KEYS}
    assert config_refusal() == config_refusal(every) == ""


@pytest.mark.parametrize("name", EXCLUDED)
def test_an_excluded_option_is_named(name: str) -> None:
    message = config_refusal(options={name: True})
    assert f"--{name.replace('_', '-')}" in message
    assert "start the server without it" in message
    assert name in message
    assert not config_refusal(options={name: None})


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("where", ["options", "params"])
def test_sizes_of_ranks_that_do_not_agree_are_refused(name: str, where: str) -> None:
    for accepted in (None, 0, 1):
        assert not config_refusal(**{where: {name: accepted}})  # type: ignore[arg-type]
    message = config_refusal(**{where: {name: 2}})  # type: ignore[arg-type]
    assert f"set {name} to 1" in message
    assert f"{name} = 2" in message


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"cpu-bytes-to-use": "x"}, "use cpu_bytes_to_use"),
        ({"KVFERRY_SALT": "x"}, "use kvferry_salt"),
        ({"master_server_address": "x"}, f"use {' or '.join(KEYS)}"),
        ({"kvferry_dirs": 3}, "write a list of directories"),
        ({"kvferry_dirs": [3]}, "kvferry_dirs = 3"),
        ({"kvferry_dirs": ["/run/kvferry/0"]}, "write 2 directories, one per rank"),
        ({"kvferry_salt": ["a"]}, "write it in quotes"),
        ({"kvferry_salt": "a" * 300}, "write a shorter text"),
        ({"cpu_bytes_to_use": 0}, "set the size of one chunk or more"),
        ({"cpu_bytes_to_use": "64 gigabytes"}, "cpu_bytes_to_use"),
        ({"eviction_policy": "fifo"}, "eviction_policy"),
        ({"store_threshold": "often"}, "set it to 0 or more"),
        ({"store_threshold": -1}, "set it to 0 or more"),
        ({"kvferry_pack": "always"}, "use 'auto' or 'on' or 'off'"),
    ],
)
def test_a_wrong_key_or_value_is_refused(extra: dict[str, Any], words: str) -> None:
    message = config_refusal(extra, ranks=2)
    assert words in message
    assert all(key in message for key in extra)
