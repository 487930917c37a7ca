"""Hints in the parameters of requests, also hostile ones."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.client.vllm.request_hints import (
    ANONYMOUS,
    MAX_READ,
    PREFETCH,
    RELEASE,
    RETAIN,
    RequestHints,
    read_hints,
)


def request(parameters: Any = None, *actions: tuple[Any, Any, Any], **fields: Any) -> Any:
    found = [
        SimpleNamespace(action_type=kind, action_version=version, payload=payload)
        for kind, version, payload in actions
    ]
    hints = SimpleNamespace(actions=found) if actions else None
    return SimpleNamespace(kv_transfer_params=parameters, kv_hints=hints, **fields)


def test_hints_of_a_client() -> None:
    retain = {RETAIN: {"seconds": 60, "tokens": 4096}, "do_remote_prefill": False}
    assert read_hints(request(retain)) == RequestHints(ANONYMOUS, 60.0, 4096)
    assert read_hints(request({RELEASE: {}, PREFETCH: {}}, session_id="s")) == RequestHints(
        "s", releases=True, prefetches=True
    )
    assert read_hints(SimpleNamespace(kv_transfer_params=None)) == RequestHints()


def test_hints_of_a_router() -> None:
    retain = "kvferry.retain", "1", {"seconds": 0.5}
    assert read_hints(request(None, retain)) == RequestHints("", 0.5)
    assert read_hints(request(None, retain, cache_salt="u")) == RequestHints("u", 0.5)
    other = "kvferry.retain", "2", {"seconds": 0.5}
    foreign = "acme.retain", "1", {"seconds": 0.5}
    assert read_hints(request(None, other, foreign)) == RequestHints(unknown=1)


@pytest.mark.parametrize(
    ("salt", "session", "label"),
    [
        ("salt", "session", "salt"),
        (None, "session", "session"),
        ("", 17, ANONYMOUS),
        ("x" * 65, None, 64),
        ("\ud800", None, 64),
        ("a\nb", None, 64),
    ],
)
def test_labels(salt: Any, session: Any, label: str | int) -> None:
    found = read_hints(request({RELEASE: {}}, cache_salt=salt, session_id=session)).label
    assert label in (found, len(found))
    assert found.isascii()


def test_a_long_time_is_shortened() -> None:
    for seconds in (3601, 1e300, 10**400):
        assert read_hints(request({RETAIN: {"seconds": seconds}})).seconds == 3600.0


NO_SECONDS: tuple[Any, ...] = 0, -1, True, "60", None, math.nan, math.inf, []
NO_TOKENS: tuple[Any, ...] = 0, -1, True, 1.5, 1 << 40, "9"


@pytest.mark.parametrize(
    "hint",
    [
        {RETAIN: None},
        {RETAIN: 60},
        {RETAIN: []},
        {RETAIN: {}},
        *({RETAIN: {"seconds": bad}} for bad in NO_SECONDS),
        *({RETAIN: {"seconds": 1, "tokens": bad}} for bad in NO_TOKENS),
        {RETAIN: {"seconds": 1, "priority": 9}},
        {RETAIN: {"seconds": 1, 5: 9}},
        {RELEASE: {"seconds": 1}},
        {RELEASE: []},
        {PREFETCH: None},
    ],
)
def test_wrong_payloads_are_refused(hint: dict[str, Any]) -> None:
    assert read_hints(request(hint)) == RequestHints(refused=1)


def test_unknown_hints_are_ignored() -> None:
    names = "kvferry.retain", "kvferry.retain@2", "kvferry.pin@1", "kvferry.", "KVFERRY.retain@1", 7
    assert read_hints(request({name: {} for name in names})) == RequestHints(unknown=4)
    strange = request(None, (7, 1, {}), ("kvferry.release", None, {}), (None, None, None))
    assert read_hints(strange) == RequestHints(unknown=1)
    wrong: tuple[Any, ...] = None, 7, "kvferry", {}
    for actions in wrong:
        hints = SimpleNamespace(kv_transfer_params={}, kv_hints=SimpleNamespace(actions=actions))
        assert read_hints(hints) == RequestHints()


def test_a_bounded_number_is_read() -> None:
    many: dict[str, Any] = {f"kvferry.{number}": {} for number in range(1000)}
    assert read_hints(request(many)).unknown == MAX_READ


def test_retain_and_release_contradict_each_other() -> None:
    both = read_hints(request({RETAIN: {"seconds": 1}, RELEASE: {}}))
    assert both == RequestHints(ANONYMOUS, 1.0, refused=1)
