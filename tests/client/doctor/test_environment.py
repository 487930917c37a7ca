"""The doctor on the environment of the engine: packages, memory, settings."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvferry.client.doctor import CheckContext, Verdict, environment
from kvferry.client.sglang import SUPPORTED, supported
from kvferry.client.sglang.supported import SIGNATURES
from support.denied_calls import call_with_denied, on_x86_64


def test_packages_that_are_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"msgspec": None, "numpy": "1.25.2", "pyzmq": "27.1.0", "torch": None}
    monkeypatch.setattr(environment, "installed_version", versions.__getitem__)
    first, second, last = environment.packages(CheckContext(None, 1.0))
    assert first.change == "pip install 'msgspec>=0.18.6'"
    assert second.found == "numpy 1.25.2 is too old"
    assert "no torch" in last.found


@pytest.mark.parametrize(
    ("setting", "verdict"),
    [
        ("", Verdict.OK),
        ("max_split_size_mb:64", Verdict.OK),
        ("max_split_size_mb:64,expandable_segments:True", Verdict.WARN),
        ("expandable_segments:False", Verdict.OK),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, name: str, setting: str, verdict: Verdict
) -> None:
    monkeypatch.setenv(name, setting)
    (finding,) = environment.allocator(CheckContext(None, 1.0))
    assert finding.verdict is verdict


@pytest.mark.parametrize(
    ("version", "seed", "verdicts"),
    [
        (None, None, []),
        ("0.9.0", None, [Verdict.WARN, Verdict.WARN]),
        ("0.26.1", "0", [Verdict.OK, Verdict.OK]),
        ("0.28.1", None, [Verdict.OK, Verdict.WARN]),
        ("0.29.0", None, [Verdict.OK, Verdict.OK]),  # it has a fixed hash seed
    ],
)
def test_vllm(
    monkeypatch: pytest.MonkeyPatch, version: str | None, seed: str | None, verdicts: list[Verdict]
) -> None:
    monkeypatch.setattr(environment, "installed_version", lambda name: version)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    found = environment.vllm(CheckContext(None, 1.0))
    assert [finding.verdict for finding in found] == verdicts


def linker() -> type:
    """As SGLang's UnifiedCacheLinker."""
    methods = {
        name: eval(f"lambda {', '.join(('self', *parameters))}: 0")
        for name, parameters in SIGNATURES.items()
    }
    return type("UnifiedCacheLinker", (), {**methods, "__abstractmethods__": {*methods}})


@pytest.mark.parametrize(
    ("version", "imported", "found", "change"),
    [
        (SUPPORTED, linker(), SUPPORTED, ""),
        ("0.5.22", AssertionError("imported"), "0.5.22 is installed", "pip install 'sglang=="),
        (SUPPORTED, object, "its linkers differ in", "pip install 'sglang=="),
        (SUPPORTED, ImportError("no orjson"), "ImportError: no orjson", "in the environment"),
        (SUPPORTED, OSError("libcuda"), f"{SUPPORTED} cannot be imported", "in the environment"),
    ],
)
def test_sglang(
    monkeypatch: pytest.MonkeyPatch, version: str, imported: Any, found: str, change: str
) -> None:
    error = imported if isinstance(imported, Exception) else None
    import_linkers = Mock(return_value=imported, side_effect=error)
    for module in (environment, supported):
        monkeypatch.setattr(module, "installed_version", lambda name: version)
    monkeypatch.setattr(environment, "import_linkers", import_linkers)
    (finding,) = environment.sglang(CheckContext(None, 1.0))
    assert finding.verdict is (Verdict.FAIL if change else Verdict.OK)
    assert found in finding.found
    assert change in finding.change
    monkeypatch.setattr(environment, "installed_version", lambda name: None)
    assert list(environment.sglang(CheckContext(None, 1.0))) == []


def test_little_shared_memory() -> None:
    (finding,) = environment.shared_memory(CheckContext(None, 1.0), minimum=1 << 60)
    assert finding.verdict is Verdict.WARN
    assert "--shm-size" in finding.change


@on_x86_64
@pytest.mark.parametrize(
    ("call", "directory", "verdict"),
    [
        ("setpriority", None, Verdict.OK),
        ("pidfd_open", None, Verdict.FAIL),
        ("pidfd_open", Path("/run/kvferry/cpu"), Verdict.OK),  # its daemon runs elsewhere
        ("memfd_create", Path("/run/kvferry/cpu"), Verdict.FAIL),
        ("sched_setscheduler", Path("/run/kvferry/cpu"), Verdict.FAIL),
    ],
)
def test_a_system_call_that_is_missing(call: str, directory: Path | None, verdict: Verdict) -> None:
    context = CheckContext(None, 1.0, directory)
    (finding,) = call_with_denied({call: errno.ENOSYS}, lambda: list(environment.kernel(context)))
    assert finding.verdict is verdict
    assert (context.directory is None) == (directory is None or verdict is Verdict.FAIL)
    if verdict is Verdict.FAIL:
        assert call in finding.found
        assert "Linux 5.3" in finding.change
