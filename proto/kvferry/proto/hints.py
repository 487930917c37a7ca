"""Messages by which an application says which keys it will use, and which it will not.

    Retain             ->
                       <-   Retained | Error
    Release            ->   (no reply)
    ReleaseRetained    ->
                       <-   Released | Error

They are messages of a session (messages.py).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from kvferry.proto.message import Message
from kvferry.proto.specs import Count, Id, Keys, Name

# The longest time of a Retain, in seconds.
MAX_RETAIN_SECONDS = 3600.0
RetainSeconds: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_RETAIN_SECONDS)]


class Retain(Message):
    """Do not evict the blocks of these keys for a time, in prefix order.

    It ends after `seconds` (or up to one second later), with Release, with a reset, and with the
    session. Sent again, it is extended. label: whose prefix it is, such as a client of the engine:
    each label has a small share of the namespace, and the engine a larger one. Empty: only the
    engine's share applies.
    """

    request_id: Id
    keys: Keys
    seconds: RetainSeconds
    label: Name = ""


class Retained(Message):
    """The reply to Retain: how many distinct keys are retained, are not loadable, and exceed a
    share. The last keys of the prefix exceed it first."""

    request_id: Id
    kept: Count
    missing: Count
    clipped: Count


class Release(Message):
    """Nobody will use these keys: end their Retain of this session and label, and evict their
    blocks first, until they are touched. Blocks are not evicted first while another engine is in
    the namespace."""

    keys: Keys
    label: Name = ""


class ReleaseRetained(Message):
    """End every Retain in a namespace; label: only those of this label. Sent by an operator.

    The reply, Released, has the bytes of the blocks that are no longer retained.
    """

    request_id: Id
    namespace: Name
    label: Name | None = None


HintMessage: TypeAlias = Retain | Release | ReleaseRetained
