"""The timeline: a counter in a shared page that says how far the engine's stream has come.

The engine advances it behind its kernels, the daemon's lane reads it with plain loads, and a
transfer that carries `wait_for = n` begins once it shows n. On CUDA the stream itself writes the
value when it gets there (cuStreamWriteValue64), so signalling costs a few microseconds and waits
for nothing; on the CPU it is a plain store. Values only grow.

One process makes the timeline and signals it; any process of the engine may name its values, also
those that are still to come.

An engine that does not wait for its jobs any longer, but reuses their blocks, revokes the page: a
daemon that is stopped, and cannot be told, finds that when it goes on. Its timeline then goes on in
a new page.
"""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
import re
import weakref
from contextlib import ExitStack, suppress
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
        # The newest value signalled; the stream may not have reached it yet.
        self.last = 0
        self._ordinal = ordinal
        self._page = _TimelinePage(ordinal)
        # A stream may still write to a page that was revoked, so each stays until `close`.
        self._revoked_pages: list[_TimelinePage] = []

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
        return self._page.counter.value

    @property
    def descriptor(self) -> int:
        """Of the current page; -1 once closed."""
        return self._page.descriptor

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
        if self._page.device_pointer:
            write = "cuStreamWriteValue64_v2"
            driver().call(write, _handle(stream), self._page.device_pointer, value, 0)
        else:
            self._page.counter.value = value
        return value

    def revoke(self) -> None:
        """Let no chunk of this timeline's jobs be submitted any more (OffloadClient.abandon).

        Jobs that the daemon has not reported as done by then do not count as done.
        """
        self._page.revoked.value = 1

    @property
    def revoked(self) -> bool:
        return bool(self._page.revoked.value)

    def renew(self) -> None:
        """Go on in a new page; the client does it when it registers again.

        The new page shows 0 until the next signal. Raises Failed (DRIVER), and nothing changed.
        """
        page = _TimelinePage(self._ordinal)
        self._revoked_pages.append(self._page)
        self._page = page

    def check_follows(self, kind: str) -> None:
        """Raise Refused (DEVICE_MISMATCH) where what is done on `kind` would not be waited for."""
        if kind != self.kind:
            message = (
                f"a timeline of the {self.kind} says nothing of KV tensors on {kind}: make it with "
                "Timeline.create(their device)"
            )
            raise Refused(Code.DEVICE_MISMATCH, message, self.kind)

    def close(self) -> None:
        """Let all pages go; nothing may signal them any more. Again is harmless."""
        with ExitStack() as closing:
            for page in (self._page, *self._revoked_pages):
                closing.callback(page.close)

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


class _TimelinePage:
    """A sealed memfd, mapped here and, on CUDA, by the GPU."""

    def __init__(self, ordinal: int | None) -> None:
        self._ordinal = ordinal
        self.descriptor = sealed_memfd("kvferry-timeline", mmap.PAGESIZE)
        page = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self.counter = ctypes.c_uint64.from_buffer(page, TIMELINE_VALUE_AT)
        self.revoked = ctypes.c_uint64.from_buffer(page, TIMELINE_REVOKED_AT)
        self.device_pointer = 0
        self._address = ctypes.addressof(self.counter)
        self._unclosed = weakref.finalize(
            self, _let_go, self.descriptor, page, self._address, ordinal
        )
        self._unclosed.atexit = False  # a thread may still use the GPU then
        if ordinal is not None:
            try:
                self.device_pointer = _reachable(ordinal, self._address)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        if self.descriptor < 0:
            return
        self._unclosed.detach()
        os.close(self.descriptor)
        self.descriptor = -1
        if self.device_pointer and self._ordinal is not None:
            with driver().visiting(self._ordinal):
                driver().call("cuMemHostUnregister", self._address)


def _reachable(ordinal: int, address: int) -> int:
    """Where a GPU finds the page at `address`, which it may write from now on."""
    with driver().visiting(ordinal):
        driver().register_host(address, mmap.PAGESIZE, mapped=True)
        try:
            return driver().host_device_pointer(address)
        except BaseException:
            driver().call("cuMemHostUnregister", address)
            raise


def _let_go(descriptor: int, _page: mmap.mmap, address: int, ordinal: int | None) -> None:
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
