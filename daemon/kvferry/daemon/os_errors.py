"""Errors of the operating system at start, as errors that name the setting to change.

Used by app.py on the main thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import zmq

from kvferry.proto.errors import Code, Refused

# Errors of a file system in which no file can be created, and of a kernel without free memory.
FILE_SYSTEM_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
MEMORY_ERRORS = frozenset({errno.ENOMEM, errno.EAGAIN})


@contextlib.contextmanager
def refuse_os_errors(directory: Path) -> Iterator[None]:
    """Turn errors of the operating system at start into Refused (BAD_CONFIG).

    directory: the runtime directory. The daemon creates no files elsewhere.
    """
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        if error.errno in FILE_SYSTEM_ERRORS:
            message = (
                f"cannot create sockets in runtime_dir {directory} ({os.strerror(error.errno)}); "
                "free some space, or set a runtime_dir on another file system"
            )
            raise Refused(Code.BAD_CONFIG, message, str(directory)) from error
        if error.errno in MEMORY_ERRORS:
            raise _no_memory(error) from error
        raise
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        raise _no_memory(error) from error


def _no_memory(error: Exception) -> Refused:
    reason = str(error) or type(error).__name__
    message = (
        f"no memory or threads left at start ({reason}); raise LimitAS, LimitNPROC, and the memory "
        "and tasks of the control group, or reduce pool.size"
    )
    return Refused(Code.BAD_CONFIG, message, reason)
