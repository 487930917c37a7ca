"""Engines with vLLM's own scheduler, where vLLM is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd


def pytest_itemcollected(item: pytest.Item) -> None:
    """Warnings of vLLM are no errors."""
    if "core" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture(scope="module")
def core() -> Any:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; see `make vllm-tests`")
    from support import vllm_core

    return vllm_core


@pytest.fixture
def start(
    core: Any, start_kvferryd: StartKvferryd, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """start(*groups, directory=..., **options) -> EngineCore, which is closed after the test.

    Engines without a directory share a daemon. What all of them have read must be right.
    """
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    engines: list[Any] = []

    @cache
    def shared_daemon() -> Path:
        return start_kvferryd().directory

    def start_engine(*groups: str, directory: Any = None, **options: Any) -> Any:
        engine = core.EngineCore(directory or shared_daemon(), groups or ("full",), **options)
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        engine.close()
        assert not engine.wrong
