"""The doctor in an environment with SGLang."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from kvferry.client.doctor import CheckContext, Verdict, environment


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_an_installed_sglang_is_supported() -> None:
    (finding,) = environment.sglang(CheckContext(None, 1.0))
    assert finding.verdict is Verdict.OK, finding
