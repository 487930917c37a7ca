"""The parser of sizes: the daemon's configuration, vLLM's, and options of the command line.

Called when these are read, on any thread.
"""

from __future__ import annotations

import re

from kvferry.proto.errors import Code, Refused

# The address space of an x86-64 process without five-level paging.
MAX_SIZE = 1 << 47
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_bytes(text: str, what: str = "size") -> int:
    """ "64GiB", "512 MiB", "1048576" -> bytes; units are powers of 1024.

    what: the key or option that has this value, for the message. Raises Refused (BAD_CONFIG).
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?\s*", text, re.IGNORECASE)
    if match is None:
        message = f'{what} = {text!r} is not a size; write it like "64GiB" or "1048576"'
        raise Refused(Code.BAD_CONFIG, message, text)
    nbytes = float(match[1]) * (1 << _UNITS[(match[2] or "").lower()])
    if nbytes > MAX_SIZE:
        message = f"{what} = {text!r} is more than {MAX_SIZE} bytes; set a smaller size"
        raise Refused(Code.BAD_CONFIG, message, text)
    return int(nbytes)
