"""Error codes and the exceptions that carry them.

Programs read the code. The message is for people: it states what is wrong, the value, and what to
change. `value` is the offending value as text. The class says what a caller can do:

    Refused   the request is wrong or untimely; correct it, or try again later
    Failed    the daemon could not do it; a failed load is a cache miss
    Gone      the job or the other side has ended; reconnect
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import msgspec


class Code(StrEnum):
    """Stable names of errors, for programs."""

    # The request is wrong or untimely: nothing was done.
    BAD_MESSAGE = "bad_message"
    MESSAGE_TOO_LARGE = "message_too_large"
    PROTOCOL_VERSION = "protocol_version"
    NO_SESSION = "no_session"
    NOT_REGISTERED = "not_registered"
    ALREADY_REGISTERED = "already_registered"
    BAD_LAYOUT = "bad_layout"
    UNKNOWN_TENSOR = "unknown_tensor"
    UNKNOWN_GROUP = "unknown_group"
    UNKNOWN_HANDLE = "unknown_handle"
    BAD_SPEC = "bad_spec"
    SIZE_MISMATCH = "size_mismatch"
    BLOCK_OUT_OF_RANGE = "block_out_of_range"
    DUPLICATE_BLOCK = "duplicate_block"
    DUPLICATE_JOB = "duplicate_job"
    NO_TIMELINE = "no_timeline"
    NOT_SHAREABLE = "not_shareable"
    DEVICE_MISMATCH = "device_mismatch"
    POOL_FULL = "pool_full"
    UNKNOWN_NAMESPACE = "unknown_namespace"
    NAMESPACE_MISMATCH = "namespace_mismatch"
    BAD_KEY = "bad_key"
    KEY_ABSENT = "key_absent"
    NOT_PINNED = "not_pinned"
    CACHE_FULL = "cache_full"
    STALE = "stale"
    BUSY = "busy"
    FORBIDDEN = "forbidden"
    SEVERAL_DAEMONS = "several_daemons"
    # Refused at start-up.
    BAD_CONFIG = "bad_config"
    NO_DEVICE = "no_device"
    ENDPOINT_IN_USE = "endpoint_in_use"
    POOL_TOO_LARGE = "pool_too_large"
    # The daemon or the device failed.
    COPY_FAILED = "copy_failed"
    MAP_FAILED = "map_failed"
    DRIVER = "driver"
    CORRUPT_BLOCK = "corrupt_block"
    # The job has ended, or the other side is not available.
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ENGINE_GONE = "engine_gone"
    DAEMON_GONE = "daemon_gone"
    SHUTTING_DOWN = "shutting_down"


FAILED = frozenset({Code.COPY_FAILED, Code.MAP_FAILED, Code.DRIVER, Code.CORRUPT_BLOCK})
# The other side is another build: trying again soon is in vain.
OTHER_BUILD = frozenset({Code.PROTOCOL_VERSION, Code.BAD_MESSAGE})
GONE = frozenset(
    {Code.CANCELLED, Code.TIMEOUT, Code.ENGINE_GONE, Code.DAEMON_GONE, Code.SHUTTING_DOWN}
)


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An error in a message. `code` is a plain string: a newer daemon may have more codes."""

    code: str
    message: str
    value: str = ""


class KVFerryError(Exception):
    """The base of all errors. `code`, `message` and `value`: as in ErrorInfo."""

    def __init__(self, code: str, message: str, value: object = "") -> None:
        super().__init__(code, message, value)
        self.code = str(code)
        self.message = message
        self.value = value if isinstance(value, str) else repr(value)

    def __str__(self) -> str:
        """The message, and the value if the message does not state it."""
        stated = rf"(?<!\w){re.escape(self.value)}(?!\w)"
        known = not self.value or re.search(stated, self.message)
        return f"[{self.code}] {self.message}" + ("" if known else f" (got {self.value})")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.value)

    @property
    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.value[:512])


class Refused(KVFerryError):
    """The request is wrong or untimely; nothing was done."""


class Failed(KVFerryError):
    """The daemon could not do what was requested. A failed load is a cache miss."""


class Gone(KVFerryError):
    """The job was cancelled, or the other side is not available."""


def error_of(info: ErrorInfo) -> KVFerryError:
    """The exception of an error in a message."""
    if info.code in FAILED:
        return Failed(info.code, info.message, info.value)
    if info.code in GONE:
        return Gone(info.code, info.message, info.value)
    return Refused(info.code, info.message, info.value)
