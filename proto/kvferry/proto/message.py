"""The base class of messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    """A message is encoded as an array: its tag, then its fields in order."""
