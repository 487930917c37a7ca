"""Tables by which the core dispatches messages and reports. Each part declares its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kvferry.daemon.core.actions import Action

# Called with the session, its message, and time.monotonic() in seconds. Raises KVFerryError.
MessageHandler: TypeAlias = Callable[[str, Any, float], list[Action]]
ReportHandler: TypeAlias = Callable[[Any], list[Action]]
# By type.
MessageTable: TypeAlias = Mapping[type, MessageHandler]
ReportTable: TypeAlias = Mapping[type, ReportHandler]
