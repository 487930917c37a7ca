"""Hints in vLLM's requests: a client's in kv_transfer_params, a router's in kv_hints (0.33).

    "kvferry.retain@1": {"seconds": s, "tokens": n}    keep the prefix; tokens: of it, or all
    "kvferry.release@1": {}                            nobody will use it
    "kvferry.prefetch@1": {}                           read it from tiers, whatever that takes

In kv_hints the action's type is the part before the @, its version the part behind. Clients send
anything, and vLLM's engine ends if its scheduler raises: so all values are checked, their number is
bounded, and what is wrong is counted. Called in the scheduler's thread. Does not import vLLM.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvferry.proto.hints import MAX_RETAIN_SECONDS

PREFIX = "kvferry."
RETAIN, RELEASE, PREFETCH = "kvferry.retain@1", "kvferry.release@1", "kvferry.prefetch@1"
# Parameters and actions of a request that are read.
MAX_READ = 64
MAX_TOKENS = 1 << 31
# Longer labels, and those with other characters, are hashed.
MAX_LABEL = 64
# Of a client whose request has neither a cache_salt nor a session_id: they share one label.
ANONYMOUS = "anonymous"


@dataclass(slots=True)
class RequestHints:
    """What a request asks for. label: whose share of host memory it is; empty: the engine's.

    seconds: to retain its prefix for, 0: not. tokens: of the prefix, None: all. unknown, refused:
    hints with another name or version, and those with a wrong payload.
    """

    label: str = ""
    seconds: float = 0.0
    tokens: int | None = None
    releases: bool = False
    prefetches: bool = False
    unknown: int = 0
    refused: int = 0


def read_hints(request: Any) -> RequestHints:
    """The hints of a vLLM Request, whose kv_transfer_params are a dictionary or None."""
    hints = RequestHints()
    for name, payload, default_label in _offered(request):
        if name not in (RETAIN, RELEASE, PREFETCH):
            hints.unknown += 1
        elif not _apply(hints, name, payload):
            hints.refused += 1
        else:
            hints.label = _label(request) or default_label
    if hints.seconds and hints.releases:  # they contradict each other
        hints.refused += 1
        hints.releases = False
    return hints


def _offered(request: Any) -> Iterator[tuple[str, object, str]]:
    """Name, payload and label of each hint."""
    parameters = request.kv_transfer_params or {}
    for name in islice(parameters, MAX_READ):
        if isinstance(name, str) and name.startswith(PREFIX):
            yield name, parameters[name], ANONYMOUS
    actions = getattr(getattr(request, "kv_hints", None), "actions", None)
    for action in islice(actions if isinstance(actions, list | tuple) else (), MAX_READ):
        name = getattr(action, "action_type", None)
        if isinstance(name, str) and name.startswith(PREFIX):
            version = getattr(action, "action_version", None)
            yield f"{name}@{version}", getattr(action, "payload", None), ""


def _apply(hints: RequestHints, name: str, payload: object) -> bool:
    """Returns whether the payload is correct."""
    if not isinstance(payload, dict):
        return False
    if name != RETAIN:
        hints.releases |= name == RELEASE and not payload
        hints.prefetches |= name == PREFETCH and not payload
        return not payload
    seconds: Any = payload.get("seconds")
    tokens: Any = payload.get("tokens")
    if not payload.keys() <= {"seconds", "tokens"} or type(seconds) not in (int, float):
        return False
    if not 0 < seconds < math.inf:  # NaN is not, either
        return False
    if tokens is not None and (type(tokens) is not int or not 0 < tokens < MAX_TOKENS):
        return False
    hints.seconds, hints.tokens = float(min(seconds, MAX_RETAIN_SECONDS)), tokens
    return True


def _label(request: Any) -> str:
    """The request's cache_salt, which a gateway sets for each user, or else its session_id."""
    for field in ("cache_salt", "session_id"):
        text = getattr(request, field, None)
        if isinstance(text, str) and text:
            if len(text) <= MAX_LABEL and text.isascii() and text.isprintable():
                return text
            return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return ""
