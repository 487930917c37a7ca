"""The log: one line per event on stderr, as text or JSON.

A log call neither raises nor blocks. If stderr cannot be written (a full disk, or a reader that has
exited or does not read), lines are lost and the daemon continues. Any thread.
"""

from __future__ import annotations

import io
import logging
import select
import sys
from typing import Any, TextIO

import structlog

from kvferry.daemon.config import LogConfig


def start_logging(config: LogConfig) -> None:
    """Log to stderr in this format and from this level on. Called at start and at a reload."""
    if config.format == "json":
        processors: tuple[structlog.typing.Processor, ...] = (
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        )
    else:
        plain = structlog.dev.plain_traceback
        colors = sys.stderr.isatty()
        processors = escape, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *processors,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[config.level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def unfailing(stream: TextIO) -> TextIO:
    """A stream to the same file whose writes never fail or block; text may be lost."""
    raw = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)


class _Lossy(io.FileIO):
    """A file whose writes report success even if the bytes are lost."""

    def write(self, data: Any, /) -> int:
        poller = select.poll()
        poller.register(
            self, select.POLLOUT
        )  # a pipe that polls as writable has room for PIPE_BUF bytes
        try:
            written = super().write(data[: select.PIPE_BUF]) if poller.poll(0) else None
        except OSError:
            written = None
        return len(data) if written is None else written  # None: it would block


class Escaped:
    """A text that the renderer shows by its repr, as it does with every object but a str."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)


def escape(_: Any, __: str, record: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape texts that clients choose: a terminal would execute control characters in them."""
    for key, value in record.items():
        if isinstance(value, str) and not value.isprintable():
            record[key] = Escaped(value)
    return record
