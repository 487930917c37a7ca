"""The timeline: a counter in a shared page that says how far the engine's stream has come.

The engine advances it behind its kernels, the daemon's lane reads it with plain loads, and a
transfer that carries `wait_for = n` begins once it shows n. On CUDA the stream itself writes the
value when it gets there (cuStreamWriteValue64), so signalling costs a few microseconds and waits
for nothing; on the CPU it is a plain store. Values only grow.

One process makes the timeline and signals it; any process of the engine may name its values, also
those that are still to come.

An engine that waits no longer for its jobs, but goes on to use their blocks, revokes the timeline:
a daemon that stands still, and cannot be told, finds that when it goes on.
"""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
import re
import weakref
from contextlib import suppress
from typing import Any, SupportsIndex

from kvferry.cuda.driver import driver
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.specs import MAX_INT
from kvferry.shm.memfd import sealed_memfd
from kvferry.shm.timeline_page import TIMELINE_REVOKED_AT, TIMELINE_VALUE_AT

_DEVICE = re.compile(r"cpu(:[0-9]+)?|cuda(:(?P<ordinal>[0-9]+))?")


class Timeline:
    """Make one with `Timeline.create(device)`; pass it to register_kv_caches.

    kind: "cpu" or "cuda", as of the KV tensors that it is registered with.
    One that is dropped and was not closed goes once its GPU has done all that it was given, which
    is waited for: its stream may write to the page until then.
    """

    def __init__(self, ordinal: int | None) -> None:
        self.kind = "cpu" if ordinal is None else "cuda"
        self._ordinal = ordinal
        self.descriptor = sealed_memfd("kvferry-timeline", mmap.PAGESIZE)
        self._page = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._counter = ctypes.c_uint64.from_buffer(self._page, TIMELINE_VALUE_AT)
        self._revoked = ctypes.c_uint64.from_buffer(self._page, TIMELINE_REVOKED_AT)
        self._address = ctypes.addressof(self._counter)
        self._device_pointer = 0
        self._unclosed = weakref.finalize(
            self, _let_go, self.descriptor, self._page, self._address, ordinal
        )
        self._unclosed.atexit = False  # a thread may still use the GPU then
        self.last = 0
        """The newest value signalled; the stream may not have reached it yet."""
        if ordinal is not None:
            try:
                self._device_pointer = _reachable(ordinal, self._address)
            except BaseException:
                self.close()
                raise

    @classmethod
    def create(cls, device: object = "cpu") -> Timeline:
        """A timeline for a device: "cpu", "cuda" (the first), "cuda:1" or a torch.device.

        Raises Refused (NO_DEVICE) for any other.
        """
        named = _DEVICE.fullmatch(str(device))
        if named is None:
            message = 'a timeline is of "cpu", "cuda", "cuda:1" or a torch.device of these'
            raise Refused(Code.NO_DEVICE, message, device)
        return cls(int(named["ordinal"] or 0) if named[0].startswith("cuda") else None)

    @property
    def reached(self) -> int:
        """The value that shows now."""
        return self._counter.value

    def signal(self, stream: Any = None, value: SupportsIndex | None = None) -> int:
        """Advance to `value` (by default the next) behind the work queued so far; returns it.

        stream: a torch.cuda.Stream or a raw handle; None is torch's current stream, which must be
        one of the timeline's device (torch.cuda.set_device). On the CPU
        there is no stream, and one is refused: what was done before this call is done.
        """
        if stream is not None and self.kind == "cpu":
            message = "a timeline of a CPU has no stream: make it with Timeline.create(its device)"
            raise Refused(Code.DEVICE_MISMATCH, message, stream)
        value = self.last = self._next(value)
        if self._device_pointer:
            write = "cuStreamWriteValue64_v2"
            driver().call(write, _handle(stream), self._device_pointer, value, 0)
        else:
            self._counter.value = value
        return value

    def revoke(self) -> None:
        """Of the jobs of this timeline's engine no copy begins from here on, and none counts that
        has not been told as done: what it brought may be somebody else's. They end when the worker
        has left. Register with another timeline then."""
        self._revoked.value = 1

    @property
    def revoked(self) -> bool:
        return bool(self._revoked.value)

    def check_follows(self, kind: str) -> None:
        """Raise Refused (DEVICE_MISMATCH) where what is done on `kind` would not be waited for."""
        if kind != self.kind:
            message = (
                f"a timeline of the {self.kind} says nothing of KV tensors on {kind}: make it with "
                "Timeline.create(their device)"
            )
            raise Refused(Code.DEVICE_MISMATCH, message, self.kind)

    def close(self) -> None:
        """Let the page go; nothing signals it any more. Again is harmless."""
        if self.descriptor < 0:
            return
        self._unclosed.detach()
        os.close(self.descriptor)
        self.descriptor = -1
        if self._device_pointer and self._ordinal is not None:
            with driver().visiting(self._ordinal):
                driver().call("cuMemHostUnregister", self._address)

    def _next(self, value: SupportsIndex | None) -> int:
        if value is None:
            return self.last + 1
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if not self.last < number <= MAX_INT:
            message = f"a timeline only grows: its next value is from {self.last + 1} to {MAX_INT}"
            raise Refused(Code.BAD_SPEC, message, value)
        return number


def _reachable(ordinal: int, address: int) -> int:
    """Where a GPU finds the page at `address`, which it may write from now on."""
    with driver().visiting(ordinal):
        driver().register_host(address, mmap.PAGESIZE, mapped=True)
        try:
            return driver().host_device_pointer(address)
        except BaseException:
            driver().call("cuMemHostUnregister", address)
            raise


def _let_go(descriptor: int, page: mmap.mmap, address: int, ordinal: int | None) -> None:
    """Of a timeline that nobody closed. The page stays mapped until the end: what comes to lie at
    an address that is registered still, the driver takes for the page."""
    os.close(descriptor)
    if ordinal is None:
        return
    with suppress(KVFerryError), driver().visiting(ordinal) as context:
        driver().drain(context)
        driver().call("cuMemHostUnregister", address)


def _handle(stream: Any) -> int:
    if stream is None:
        import torch

        stream = torch.cuda.current_stream()
    return int(getattr(stream, "cuda_stream", stream))
