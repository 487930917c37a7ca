"""What every daemon refuses to open; clients check it before they connect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.daemon.core.cache import policies
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.messages import OpenNamespace
from kvferry.proto.opening import (
    MAX_FINGERPRINT_BYTES,
    MAX_SMALL_BLOCKS,
    POLICIES,
    check_opening,
    policy_name,
)

OPENING = OpenNamespace(1, Fingerprint("model", 64))
LONG = Fingerprint("model", 64, extra=tuple((str(n), "x" * 250) for n in range(20)))


def test_the_policies_are_those_of_the_daemon() -> None:
    assert tuple(policies.POLICIES) == POLICIES


def test_a_policy_is_named_in_any_case() -> None:
    for name in ("lru", "LRU", "Arc", "s3FIFO"):
        assert policy_name(name) == name.lower()
        check_opening(msgspec.structs.replace(OPENING, policy=name))
    unknown: tuple[Any, ...] = ("lfu", "arc ", "", None, True, 5, ["lru"], float("nan"))
    for name in unknown:
        with pytest.raises(Refused, match="use lru or arc or s3fifo") as refused:
            policy_name(name)
        assert refused.value.code == Code.BAD_SPEC


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"policy": "lfu"}, Code.BAD_SPEC, "use lru"),
        ({"quota_bytes": 63}, Code.POOL_FULL, "request at least 64 bytes"),
        ({"quota_bytes": 0}, Code.POOL_FULL, "request at least 64 bytes"),
        ({"quota_bytes": 64 * (MAX_SMALL_BLOCKS + 1)}, Code.BAD_LAYOUT, "more than the 1048576"),
        ({"fingerprint": LONG}, Code.BAD_SPEC, f"more than {MAX_FINGERPRINT_BYTES}"),
    ],
)
def test_what_every_daemon_refuses(change: dict[str, Any], code: Code, message: str) -> None:
    for accepted in (None, 64, 64 * MAX_SMALL_BLOCKS):
        check_opening(msgspec.structs.replace(OPENING, quota_bytes=accepted))
    with pytest.raises(Refused, match=message) as refused:
        check_opening(msgspec.structs.replace(OPENING, **change))
    assert refused.value.code == code
