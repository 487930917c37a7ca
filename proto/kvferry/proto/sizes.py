"""Sizes as text: parsed from the daemon's configuration, vLLM's and the command line, and printed.

The grammar is that of Kubernetes' quantities up to T: a number, which may have decimals and an
exponent, and a unit. k, M, G and T are powers of 1000; Ki, Mi, Gi and Ti are powers of 1024. A "B"
may follow. Lower case is refused: for docker and Java "64g" is 64 GiB. Called when a configuration
or an option is read, on any thread.
"""

from __future__ import annotations

import re
from decimal import Decimal

from kvferry.proto.errors import Code, Refused

# The address space of an x86-64 process without five-level paging.
MAX_SIZE = 1 << 47
_DECIMAL = {name: 1000**power for power, name in enumerate(("", "k", "M", "G", "T"))}
_BINARY = {name: 1024**power for power, name in enumerate(("Ki", "Mi", "Gi", "Ti"), 1)}
_UNITS = _DECIMAL | _BINARY
_UNIT_NAMES = ("B", "KiB", "MiB", "GiB", "TiB")
# Two digits of an exponent are enough, and bound the result.
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\s*(k|M|G|T|Ki|Mi|Gi|Ti|)B?\s*")


def parse_bytes(text: str, what: str = "size") -> int:
    """ "64GiB", "64Gi", "64GB", "512 MiB", "1048576", "6.87e+10" -> bytes, rounded down.

    what: the key or option that has this value, for the message. Raises Refused (BAD_CONFIG).
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        message = f'{what} = {text!r} is not a size; write it like "64GiB", "64GB" or "1048576"'
        raise Refused(Code.BAD_CONFIG, message, text)
    nbytes = Decimal(match[1]) * _UNITS[match[2]]
    if nbytes > MAX_SIZE:
        message = f"{what} = {text!r} is more than {format_size(MAX_SIZE)}; set a smaller size"
        raise Refused(Code.BAD_CONFIG, message, text)
    return int(nbytes)


def format_size(nbytes: float) -> str:
    """4096 -> "4 KiB", 1600 -> "1.56 KiB"."""
    power = 0
    while nbytes >= 1024 and power < len(_UNIT_NAMES) - 1:
        nbytes, power = nbytes / 1024, power + 1
    digits = 0 if nbytes == int(nbytes) else 1 if nbytes >= 100 else 2
    return f"{nbytes:.{digits}f} {_UNIT_NAMES[power]}"
