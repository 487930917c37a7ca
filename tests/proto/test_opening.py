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


@pytest.mark.parametrize("name", ["lru", "LRU", "Arc", "s3FIFO"])
def test_a_policy_is_named_in_any_case(name: str) -> None:
    assert policy_name(name) == name.lower()
    check_opening(msgspec.structs.replace(OPENING, policy=name))


@pytest.mark.parametrize("name", ["lfu", "arc ", "", None, True, 5, ["lru"], float("nan")])
def test_an_unknown_policy_is_refused(name: Any) -> None:
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
    with pytest.raises(Refused, match=message) as refused:
        check_opening(msgspec.structs.replace(OPENING, **change))
    assert refused.value.code == code


@pytest.mark.parametrize("quota", [None, 64, 64 * MAX_SMALL_BLOCKS])
def test_a_quota_of_one_block_is_enough(quota: int | None) -> None:
    check_opening(msgspec.structs.replace(OPENING, quota_bytes=quota))
