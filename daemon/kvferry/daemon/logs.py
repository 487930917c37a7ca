"""The log: one line per event on stderr, as text or JSON.

If stderr cannot be written (full disk, or a reader that has exited or does not read), lines are
lost and the daemon continues. A log call must neither raise nor block. Any thread.
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
    if config.format == "json":
        form: tuple[structlog.typing.Processor, ...] = (
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        )
    else:
        plain = structlog.dev.plain_traceback
        colors = sys.stderr.isatty()
        form = escape, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *form,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[config.level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def unfailing(stream: TextIO) -> TextIO:
    """Another stream to the same file, to which anything may be said."""
    raw = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)


class _Lossy(io.FileIO):
    def write(self, data: Any, /) -> int:
        poller = select.poll()
        poller.register(self, select.POLLOUT)  # of a pipe: there is room for so much
        try:
            written = super().write(data[: select.PIPE_BUF]) if poller.poll(0) else None
        except OSError:
            written = None
        return len(data) if written is None else written  # None: it would wait


class Escaped:
    """A text that is shown as Python would write it: the renderer shows what is no str by repr."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)


def escape(_: Any, __: str, record: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What clients call themselves is theirs to choose, and a terminal would obey some of it."""
    for key, value in record.items():
        if isinstance(value, str) and not value.isprintable():
            record[key] = Escaped(value)
    return record
