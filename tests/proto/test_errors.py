"""Errors: the class of each code, on the wire and pickled."""

from __future__ import annotations

import pickle

import pytest

from kvferry.proto.errors import (
    FAILED,
    GONE,
    Code,
    ErrorInfo,
    Failed,
    Gone,
    KVFerryError,
    Refused,
    error_of,
)


def test_codes_of_failed_and_gone() -> None:
    """All other codes are Refused. Clients depend on the classes, so they must not change."""
    assert {"copy_failed", "map_failed", "driver", "corrupt_block"} == FAILED
    assert {"cancelled", "timeout", "engine_gone", "daemon_gone", "shutting_down"} == GONE
    assert not FAILED & GONE


@pytest.mark.parametrize("code", [*Code, "unknown_code"])
def test_an_error_from_the_wire_has_the_class_of_its_code(code: str) -> None:
    kind = Failed if code in FAILED else Gone if code in GONE else Refused
    error = error_of(ErrorInfo(code, "what it means", "17"))
    assert type(error) is kind
    assert error.info == ErrorInfo(code, "what it means", "17")


@pytest.mark.parametrize("kind", [KVFerryError, Refused, Failed, Gone])
def test_errors_can_be_pickled(kind: type[KVFerryError]) -> None:
    error = kind(Code.BUSY, "poll first", 17)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.code, copy.message, copy.value) == ("busy", "poll first", "17")
    assert str(copy) == str(error) == "[busy] poll first (got 17)"
    assert str(kind(Code.BUSY, "poll first")) == "[busy] poll first"
    assert len(kind(Code.BAD_SPEC, "no", "v" * 10_000).info.value) == 512
