"""Sizes as people write them, in the daemon's configuration and in vLLM's."""

from __future__ import annotations

import re

from kvferry.proto.errors import Code, Refused

MAX_SIZE = 1 << 47
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_bytes(text: str) -> int:
    """ "64GiB", "512 MiB", "1048576" -> bytes; units are powers of 1024.

    Raises Refused (BAD_CONFIG).
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?\s*", text, re.IGNORECASE)
    if match is None:
        raise Refused(Code.BAD_CONFIG, 'a size is written like "64GiB" or "1048576"', text)
    nbytes = float(match[1]) * (1 << _UNITS[(match[2] or "").lower()])
    if nbytes > MAX_SIZE:
        raise Refused(Code.BAD_CONFIG, f"a size is at most {MAX_SIZE} bytes", text)
    return int(nbytes)
