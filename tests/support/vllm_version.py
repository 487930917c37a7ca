"""The installed version of vLLM. Does not import vLLM."""

from __future__ import annotations

import re

from kvferry.proto.version import installed_version


def has_vllm(major: int, minor: int) -> bool:
    """Whether this version or a newer one is installed."""
    numbers = re.match(r"(\d+)\.(\d+)", installed_version("vllm") or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (major, minor)
