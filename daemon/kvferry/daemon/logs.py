"""The log: lines to stderr, for people or for programs."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from kvferry.daemon.config import LogConfig


def start_logging(config: LogConfig) -> None:
    if config.format == "json":
        form: tuple[structlog.typing.Processor, ...] = (structlog.processors.JSONRenderer(),)
    else:
        form = escape, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
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
