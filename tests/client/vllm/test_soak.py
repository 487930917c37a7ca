"""A short form of the soak whose engines have vLLM's scheduler (tests/faults/README.md)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from support.soak import SoakOptions, soak

# Also the time for starting and stopping on a busy machine.
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def test_windows_resets_and_faults(pytestconfig: pytest.Config) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from kvferry.client.vllm import compat

    if not compat.REPORTS_FAILED_REQUESTS:
        pytest.skip("a failed load ends this vLLM if there are several KV cache groups")
    options = SoakOptions(15.0, faults=0.7, vllm=True, seed=pytestconfig.option.seed)
    verdict = soak(options, print)
    print(verdict.record())
    assert not verdict.errors, "\n".join(verdict.errors)
    assert verdict.statistics.counts["vLLM chunks loaded"] > 0
    assert sum(verdict.faults.values()) > 0
