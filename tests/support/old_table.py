"""Files of block tables in the format before this one, which had no epochs."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from kvferry.daemon.core.block_lines import line_type
from kvferry.daemon.core.records import RegionRecord, encode_record
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.daemon.persistence.table_file import LINES_AT, OLD_MAGIC
from kvferry.shm.memfd import sealed_memfd

FIELDS = "stamp", "checksum", "part", "version", "committed", "key"


def old_table(record: RegionRecord, lines: Mapping[int, tuple[Any, ...]], resets: int = 0) -> int:
    """The descriptor of a file. lines: FIELDS of blocks, by number. resets: of the namespace."""
    kind = line_type(record.key_bytes)
    old = np.zeros(record.num_blocks, np.dtype([(name, kind[name]) for name in FIELDS], align=True))
    for block, line in lines.items():
        old[block] = line
    fields = msgspec.msgpack.decode(encode_record(record)) | {"generation": 1 + resets}
    del fields["epoch"]
    data = msgspec.msgpack.encode(fields)
    descriptor = sealed_memfd("old", LINES_AT + old.nbytes)
    os.pwrite(descriptor, OLD_MAGIC, 0)
    os.pwrite(descriptor, struct.pack("<II", len(data), zlib.crc32(data)) + data, PAGE)
    os.pwrite(descriptor, old.tobytes(), LINES_AT)
    return descriptor
