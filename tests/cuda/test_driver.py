"""An unusable CUDA driver is refused, and the error states what to change."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.cuda.driver import Driver
from kvferry.daemon.engine.cuda import cuda_engine
from kvferry.daemon.engine.cuda.cuda_engine import CudaEngine, CudaOptions
from kvferry.proto.errors import Code, Refused

ERROR_TEXT = b"no CUDA-capable device is detected"


@dataclass
class Library:
    """A libcuda.so.1 whose functions do nothing."""

    version: int = 13000
    init: int = 0
    missing: str = ""
    # The thread's current context. The context of device n is 100 + n.
    current: int | None = None

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self.missing:
            raise AttributeError(f"libcuda.so.1: undefined symbol: {name}")

        def function(*arguments: Any) -> int:
            if name == "cuDriverGetVersion":
                arguments[0]._obj.value = self.version
            if name == "cuDevicePrimaryCtxRetain":
                arguments[0]._obj.value = 100 + arguments[1]
            if name == "cuCtxGetCurrent":
                arguments[0]._obj.value = self.current
            if name == "cuCtxSetCurrent":
                self.current = arguments[0].value
            if name == "cuGetErrorString":
                arguments[1]._obj.value = ERROR_TEXT
            return self.init if name == "cuInit" else 0

        return function


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    for loader in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, loader, lambda name: library)
    return library


CANNOT_START = "cuInit returned 100: no CUDA-capable device is detected"


@pytest.mark.parametrize(
    ("unusable", "message", "value"),
    [
        ({"version": 12040}, "install 570 or newer", "CUDA 12.4"),
        # A call that every supported driver has.
        ({"missing": "cuStreamWriteValue64_v2"}, "install 570 or newer", "cuStreamWriteValue64"),
        ({"init": 100}, CANNOT_START, CANNOT_START),
    ],
)
def test_an_unusable_driver(
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    unusable: dict[str, Any],
    message: str,
    value: str,
) -> None:
    vars(library).update(unusable)
    monkeypatch.setattr(cuda_engine, "driver", Driver)
    with pytest.raises(Refused, match=message) as refused:
        CudaEngine("0", CudaOptions("auto", 64 << 20, 1 << 20))
    assert refused.value.code == Code.NO_DEVICE
    assert value in refused.value.value


@pytest.mark.parametrize(("before", "after"), [(100, 100), (7, 7), (None, 101)])
def test_a_current_context_is_restored(
    library: Library, before: int | None, after: int | None
) -> None:
    """A process with several GPUs has the same current device as before."""
    library.current = before
    with Driver().visiting(1) as context:
        assert library.current == context == 101
    assert library.current == after
    with pytest.raises(ZeroDivisionError), Driver().visiting(1):
        raise ZeroDivisionError
    assert library.current == after
