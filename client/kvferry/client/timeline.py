"""The timeline: a counter in a shared page, with the value that the engine's stream has reached.

The engine signals it after its kernels, and the daemon's device worker reads it with plain loads. A
transfer with `wait_for = n` begins when the counter is n or more. On CUDA the stream writes the
value (cuStreamWriteValue64), so a signal costs a few microseconds and does not wait; on the CPU it
is a plain store. Values only increase.

One process creates the timeline and signals it. Any process of the engine may use its values, also
future ones.

An engine that abandons its jobs and reuses their blocks revokes the page. A stopped daemon, which
receives no message, reads that when it continues. The timeline then continues in a new page.
"""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
import weakref
from contextlib import ExitStack, suppress
from typing import Any, SupportsIndex

from kvferry.client.process_bound import ProcessBound
from kvferry.client.validation import checked_device
from kvferry.cuda.driver import driver
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.specs import MAX_INT
from kvferry.shm.memfd import sealed_memfd
from kvferry.shm.timeline_page import TIMELINE_REVOKED_AT, TIMELINE_VALUE_AT


class Timeline(ProcessBound):
    """Create one with `Timeline.create(device)`; pass it to register_kv_caches.

    It cannot be pickled: another process would signal a copy, whose values reach nobody.
    kind: "cpu" or "cuda", the device type of the KV tensors.
    Garbage collection of a timeline that was not closed synchronizes its GPU, whose stream may
    still write to the page.
    """

    INSTEAD = (
        "signal it there, and pass only its values to other processes; or create it with "
        "Timeline.create in the process that signals, and register the KV caches there"
    )

    def __init__(self, ordinal: int | None) -> None:
        self.kind = "cpu" if ordinal is None else "cuda"
        # The newest value signalled; the stream may not have reached it yet.
        self.last = 0
        self._ordinal = ordinal
        self._page = _TimelinePage(ordinal)
        # A stream may still write to a revoked page, so all are kept until `close`.
        self._revoked_pages: list[_TimelinePage] = []

    @classmethod
    def create(cls, device: object = "cpu") -> Timeline:
        """A timeline for a device: "cpu", "cuda" (the first), "cuda:1" or a torch.device.

        Raises Refused (NO_DEVICE) for any other.
        """
        return cls(checked_device(device))

    @property
    def reached(self) -> int:
        """The value that the counter has reached."""
        return self._page.counter.value

    @property
    def descriptor(self) -> int:
        """The memfd of the current page; -1 once closed."""
        return self._page.descriptor

    def signal(self, stream: Any = None, value: SupportsIndex | None = None) -> int:
        """Set the counter to `value` (default: the next) after the work queued so far; returns it.

        stream: a torch.cuda.Stream or a raw handle; None for torch's current stream, which must
        belong to the timeline's device (torch.cuda.set_device). On the CPU there are no streams:
        the value is set at once, and a stream is refused (DEVICE_MISMATCH).
        """
        if stream is not None and self.kind == "cpu":
            message = "a CPU timeline has no stream; use Timeline.create(device of the stream)"
            raise Refused(Code.DEVICE_MISMATCH, message, stream)
        value = self.last = self._next_value(value)
        if self._page.device_pointer:
            write = "cuStreamWriteValue64_v2"
            driver().call(write, _stream_handle(stream), self._page.device_pointer, value, 0)
        else:
            self._page.counter.value = value
        return value

    def revoke(self) -> None:
        """Have the daemon submit no further chunk of this timeline's jobs (OffloadClient.abandon).

        Jobs whose result has not arrived are treated as lost.
        """
        self._page.revoked.value = 1

    @property
    def revoked(self) -> bool:
        return bool(self._page.revoked.value)

    def renew(self) -> None:
        """Continue in a new page; the client calls this when it registers again.

        The new counter is 0 until the next signal. Raises Failed (DRIVER); nothing changes then.
        """
        page = _TimelinePage(self._ordinal)
        self._revoked_pages.append(self._page)
        self._page = page

    def check_device(self, kind: str) -> None:
        """Raise Refused (DEVICE_MISMATCH) if the KV tensors' device type is another one."""
        if kind != self.kind:
            message = (
                f"the timeline's device is {self.kind}, but the KV tensors are on {kind}; use "
                "Timeline.create(their device)"
            )
            raise Refused(Code.DEVICE_MISMATCH, message, self.kind)

    def close(self) -> None:
        """Release all pages; no signal is allowed afterwards. Calling it twice is harmless."""
        with ExitStack() as closing:
            for page in (self._page, *self._revoked_pages):
                closing.callback(page.close)

    def _next_value(self, value: SupportsIndex | None) -> int:
        if value is None:
            return self.last + 1
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if not self.last < number <= MAX_INT:
            message = f"a timeline only increases; give a value from {self.last + 1} to {MAX_INT}"
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
        self._finalizer = weakref.finalize(
            self, _release_page, self.descriptor, page, self._address, ordinal
        )
        self._finalizer.atexit = False  # another thread may still use the GPU
        if ordinal is not None:
            try:
                self.device_pointer = _map_page(ordinal, self._address)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        if self.descriptor < 0:
            return
        self._finalizer.detach()
        os.close(self.descriptor)
        self.descriptor = -1
        if self.device_pointer and self._ordinal is not None:
            with driver().visiting(self._ordinal):
                driver().call("cuMemHostUnregister", self._address)


def _map_page(ordinal: int, address: int) -> int:
    """Register the page with the driver; returns the GPU's address of it."""
    with driver().visiting(ordinal):
        driver().register_host(address, mmap.PAGESIZE, mapped=True)
        try:
            return driver().host_device_pointer(address)
        except BaseException:
            driver().call("cuMemHostUnregister", address)
            raise


def _release_page(descriptor: int, _page: mmap.mmap, address: int, ordinal: int | None) -> None:
    """Finalizer of a page that was not closed. The page stays mapped until it is unregistered: the
    driver would take other memory at its address for the page."""
    os.close(descriptor)
    if ordinal is None:
        return
    with suppress(KVFerryError), driver().visiting(ordinal) as context:
        driver().drain(context)
        driver().call("cuMemHostUnregister", address)


def _stream_handle(stream: Any) -> int:
    if stream is None:
        import torch

        stream = torch.cuda.current_stream()
    return int(getattr(stream, "cuda_stream", stream))
