"""The calls of the CUDA driver (libcuda.so.1) that the client and the daemon use, through ctypes.

The client uses it to export KV tensors and to signal a timeline; the daemon uses it on its device
worker and its pinning threads. A call acts on the current context of the calling thread.
`retain_context` makes the primary context of a device current, which torch also uses. Names and
types are those of cuda.h (CUDA 12.8 and later). A call releases the GIL, except those in `_QUICK`,
which only enqueue work or query an event. A driver error becomes Failed(DRIVER) with the name of
the call and the driver's error text.

Why ctypes and not NVIDIA's cuda-bindings: the client runs in the environment of an inference
engine and must have few dependencies. cuda-bindings would add a compiled one whose major version
must match the CUDA version there (12.x and 13.x are separate wheels). And a batched copy takes
arrays of addresses and sizes, which the daemon has as numpy arrays: ctypes passes pointers to them
without building Python lists.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any
from uuid import UUID

import numpy as np

from kvferry.proto.errors import Code, Failed, Refused

IPC_HANDLE_BYTES = 64
# CUDA 12.8, as cuDriverGetVersion reports it.
MIN_DRIVER = 12080
TOO_OLD = "the NVIDIA driver is too old; install 570 or newer (CUDA 12.8)"
ADVICE = "use kvferryd --device cpu, or repair the driver"

_NOT_READY = 600
_POINTER_LEGACY_IPC_CAPABLE = 10
_ATTRIBUTE_NAME = 128


class IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class MemoryLocation(ctypes.Structure):
    """CUmemLocation. type 1: a device, with ordinal `id`."""

    _fields_ = (("type", c_int), ("id", c_int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. order 1 (STREAM): sources are read in stream order."""

    _fields_ = (
        ("order", c_int),
        ("src", MemoryLocation),
        ("dst", MemoryLocation),
        ("flags", c_uint),
    )


_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxGetDevice": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (c_void_p, IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemGetAllocationGranularity": (c_void_p, c_void_p, c_int),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (c_void_p, c_void_p, c_int),
    "cuMemGetAllocationPropertiesFromHandle": (c_void_p, c_uint64),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemHostAlloc": (c_void_p, c_size_t, c_uint),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuCtxGetStreamPriorityRange": (c_void_p, c_void_p),
    "cuStreamCreateWithPriority": (c_void_p, c_uint, c_int),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamWriteValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
}
_QUICK = frozenset(
    {
        "cuMemcpyAsync",
        "cuLaunchKernel",
        "cuStreamWaitEvent",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
    }
)


class Event:
    """A CUDA event. It is reused once nothing references it."""

    __slots__ = ("_spare", "handle")

    def __init__(self, handle: int, spare: list[int]) -> None:
        self.handle, self._spare = handle, spare

    def __del__(self) -> None:
        self._spare.append(self.handle)


class Parameters:
    """Parameters of a kernel, passed by value: the bytes of each array at the time of a launch."""

    def __init__(self, *arrays: np.ndarray[Any, Any]) -> None:
        self.arrays = arrays
        self.addresses = (c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


class Driver:
    """libcuda.so.1, initialized. Raises Refused (NO_DEVICE).

    All methods raise Failed (DRIVER), as does `driver.call("cuMemFree_v2", pointer)`.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self._quick = ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            message = f"no NVIDIA driver ({error}); {ADVICE}"
            raise Refused(Code.NO_DEVICE, message, str(error)) from error
        self._functions: dict[str, Any] = {}
        for name, arguments in _PROTOTYPES.items():
            library = self._quick if name in _QUICK else self._library
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise Refused(Code.NO_DEVICE, f"{error}: {TOO_OLD}", str(error)) from error
            function.argtypes = arguments
            function.restype = c_int
            self._functions[name] = function
        self._query = self._functions["cuEventQuery"]
        self._spare_events: list[int] = []
        self._elapsed = (
            self.optional("cuEventElapsedTime_v2", quick=True) or self._quick.cuEventElapsedTime
        )
        try:
            self.call("cuInit", 0)
        except Failed as error:
            message = f"the NVIDIA driver cannot start ({error.value}); {ADVICE}"
            raise Refused(Code.NO_DEVICE, message, error.value) from error

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of `_PROTOTYPES`. Raises Failed (DRIVER) for an error."""
        result = self._functions[name](*arguments)
        if result:
            raise self.error(name, result)

    def error(self, name: str, result: int) -> Failed:
        """The error for the CUresult of a function."""
        text = c_char_p()
        self._library.cuGetErrorString(c_int(result), byref(text))
        description = (text.value or b"unknown error").decode()
        failure = f"{name} returned {result}: {description}"
        return Failed(Code.DRIVER, f"{failure}; check nvidia-smi and the kernel log", failure)

    def optional(self, name: str, *, quick: bool = False) -> Any:
        """A function that not every driver has, with untyped arguments; None if it is missing.

        quick: call it without releasing the GIL.
        """
        function = getattr(self._quick if quick else self._library, name, None)
        if function is not None:
            function.restype = c_int
        return function

    @property
    def version(self) -> int:
        """As cuda.h numbers it: 13000 for CUDA 13.0."""
        return self._int("cuDriverGetVersion")

    def device_count(self) -> int:
        return self._int("cuDeviceGetCount")

    def device_attribute(self, attribute: int, ordinal: int) -> int:
        """attribute: a number of CUdevice_attribute."""
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), attribute, ordinal)
        return value.value

    def device_uuid(self, ordinal: int) -> str:
        raw = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", raw, ordinal)
        return f"GPU-{UUID(bytes=bytes(raw))}"

    def device_name(self, ordinal: int) -> str:
        name = ctypes.create_string_buffer(_ATTRIBUTE_NAME)
        self.call("cuDeviceGetName", name, _ATTRIBUTE_NAME, ordinal)
        return name.value.decode()

    def pci_address(self, ordinal: int) -> str:
        """As "0000:3B:00.0"."""
        name = ctypes.create_string_buffer(_ATTRIBUTE_NAME)
        self.call("cuDeviceGetPCIBusId", name, _ATTRIBUTE_NAME, ordinal)
        return name.value.decode()

    def current_device(self) -> int:
        return self._int("cuCtxGetDevice")

    def retain_context(self, ordinal: int) -> int:
        """Make a device's primary context current in this thread; torch uses the same one."""
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), ordinal)
        self.call("cuCtxSetCurrent", context)
        return context.value or 0

    @contextmanager
    def visiting(self, ordinal: int) -> Iterator[int]:
        """Make a device's primary context current; afterwards restore the thread's context.

        So torch's current device stays the same. A thread without a context keeps the new one.
        """
        before = c_void_p()
        self.call("cuCtxGetCurrent", byref(before))
        try:
            yield self.retain_context(ordinal)
        finally:
            if before:
                self.call("cuCtxSetCurrent", before)

    def drain(self, context: int) -> None:
        """Wait for all work of a context. The thread's current context stays the same."""
        self.call("cuCtxPushCurrent_v2", context)
        try:
            self.call("cuCtxSynchronize")
        finally:
            self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    # Memory

    def address_range(self, pointer: int) -> tuple[int, int]:
        """(first address, bytes) of the allocation that contains a device pointer."""
        base, size = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(size), pointer)
        return base.value, size.value

    def ipc_capable(self, pointer: int) -> bool:
        """False for memory that cuIpcGetMemHandle cannot share (expandable segments, pools)."""
        capable = c_int()
        self.call("cuPointerGetAttribute", byref(capable), _POINTER_LEGACY_IPC_CAPABLE, pointer)
        return bool(capable.value)

    def ipc_handle(self, base: int) -> bytes:
        """The IPC handle of an allocation, given its first address."""
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation; return its address. cuIpcCloseMemHandle unmaps it."""
        pointer = c_uint64()
        self.call("cuIpcOpenMemHandle_v2", byref(pointer), IpcHandle.from_buffer_copy(handle), 1)
        return pointer.value

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory; return its address. cuMemFree_v2 frees it."""
        pointer = c_uint64()
        self.call("cuMemAlloc_v2", byref(pointer), nbytes)
        return pointer.value

    def register_host(
        self, address: int, nbytes: int, *, mapped: bool = False, writable: bool = True
    ) -> None:
        """Page-lock host memory for all contexts. mapped: also map it for access by the device.
        writable: False for memory that is mapped read-only."""
        flags = 1 | (2 if mapped else 0) | (0 if writable else 8)
        self.call("cuMemHostRegister_v2", address, nbytes, flags)

    def host_device_pointer(self, address: int) -> int:
        """The device address of host memory that was registered with `mapped`."""
        pointer = c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", byref(pointer), address, 0)
        return pointer.value

    def copy_to_device(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        """Copy a contiguous array to device memory. Returns when it is copied."""
        self.call("cuMemcpyHtoD_v2", pointer, array.ctypes.data, array.nbytes)

    # Streams and events

    def create_stream(self, *, urgent: bool = False) -> int:
        """Create a stream that does not synchronize with the default one.

        urgent: with the highest priority instead of the lowest.
        """
        stream, lowest, highest = c_void_p(), c_int(), c_int()
        self.call("cuCtxGetStreamPriorityRange", byref(lowest), byref(highest))
        priority = highest.value if urgent else lowest.value
        self.call("cuStreamCreateWithPriority", byref(stream), 1, priority)
        return stream.value or 0

    def record(self, stream: int) -> Event:
        """Record an event after everything that was enqueued on a stream so far."""
        event = Event(self._event(), self._spare_events)
        self.call("cuEventRecord", event.handle, stream)
        return event

    def _event(self) -> int:
        if self._spare_events:
            return self._spare_events.pop()
        event = c_void_p()
        self.call("cuEventCreate", byref(event), 0)
        return event.value or 0

    def reached(self, event: Event) -> bool:
        """Whether the device has reached an event."""
        result = self._query(event.handle)
        if result and result != _NOT_READY:
            raise self.error("cuEventQuery", result)
        return not result

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Seconds between two events that were reached."""
        milliseconds = ctypes.c_float()
        result = self._elapsed(byref(milliseconds), c_void_p(start.handle), c_void_p(end.handle))
        if result:
            raise self.error("cuEventElapsedTime", result)
        return float(milliseconds.value) / 1e3

    # Kernels

    def load_module(self, image: bytes) -> int:
        """Load a module from PTX or a cubin."""
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), image)
        return module.value or 0

    def module_function(self, module: int, name: str) -> int:
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), module, name.encode())
        return function.value or 0

    def launch(
        self,
        function: int,
        grid: int,
        threads: int,
        stream: int,
        parameters: Parameters,
    ) -> None:
        """Launch a kernel. grid: thread blocks. threads: per block."""
        shape = (grid, 1, 1, threads, 1, 1)
        self.call("cuLaunchKernel", function, *shape, 0, stream, parameters.addresses, None)

    def _int(self, name: str) -> int:
        value = c_int()
        self.call(name, byref(value))
        return value.value


@cache
def driver() -> Driver:
    """The driver of this process, loaded once. Raises Refused (NO_DEVICE)."""
    return Driver()
