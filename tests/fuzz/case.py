"""The input of a target: a case, which is one typed object in msgpack.

So one mutator changes fields for all targets, and a corpus stays readable. Bytes that are no case
are not run, and a fuzzer does not keep them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec
import structlog

Run: TypeAlias = Callable[[bytes], None]
T = TypeVar("T")


class NotACaseError(Exception):
    """The bytes are no input of this target."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is fuzzed.

    open: sets the target up; the result handles one input, and raises AssertionError, or what the
    product raises, if an invariant does not hold. seeds: inputs of honest peers and undamaged
    files. mutations: how many mutated inputs the short form handles, in a second or two.
    """

    open: Callable[[], AbstractContextManager[Run]]
    seeds: Callable[[], Sequence[bytes]]
    mutations: int


class Change(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A file or a memory has `data` at byte `offset`."""

    offset: int
    data: bytes


def case_decoder(kind: Any) -> Callable[[bytes], Any]:
    """Returns a function that decodes a case, and raises NotACaseError."""
    decoder = msgspec.msgpack.Decoder(kind)

    def decode(data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except (ValueError, RecursionError) as error:
            raise NotACaseError(str(error)) from error

    return decode


def steps_decoder(kind: Any) -> Callable[[bytes], list[Any]]:
    """As case_decoder, for a case of several steps. Those that are none are left out."""
    decode_all, decode = case_decoder(tuple[msgspec.Raw, ...]), case_decoder(kind)

    def decode_steps(data: bytes) -> list[Any]:
        steps = list[Any]()
        for raw in decode_all(data):
            with suppress(NotACaseError):
                steps.append(decode(bytes(raw)))
        if not steps:
            raise NotACaseError("no step")
        return steps

    return decode_steps


def pick(values: Sequence[T], number: int) -> T:
    """One of some values, for any number."""
    return values[number % len(values)]


def apply_changes(memory: bytearray, changes: Sequence[Change]) -> bytearray:
    """Overwrite a copy of a file; its size stays."""
    for change in changes:
        at = change.offset % max(1, len(memory))
        data = change.data[: len(memory) - at]
        memory[at : at + len(data)] = data
    return memory


def complete(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError(f"{coroutine} waits")


@contextmanager
def no_log() -> Iterator[None]:
    """The product logs nothing: hostile input is logged, and a fuzzer sends much of it."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
