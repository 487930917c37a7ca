"""vLLM's own scheduler, where vLLM is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest


@pytest.fixture(scope="module")
def core() -> Any:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from support import vllm_core

    return vllm_core
