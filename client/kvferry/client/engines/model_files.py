"""What identifies the weights of a model: the commit in the hub's cache, or its files.

Called when an engine starts, in each of its processes; all must read the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Files of a model's directory that can change its KV.
MODEL_SUFFIXES = frozenset({".bin", ".gguf", ".json", ".pt", ".pth", ".py", ".safetensors"})
# Files up to this size are hashed: a configuration may be rewritten, unchanged, at each start. A
# larger file is identified by its name in the hub's cache, or by its size, modification time and
# samples. Times alone are equal in reproducible images; samples alone miss a change between them.
MAX_HASHED_BYTES = 32 << 20
# Samples of a larger file, spread evenly: 1 MiB per file, beside the header of safetensors.
SAMPLES, SAMPLE_BYTES = 16, 64 << 10
# Maximum of bytes that are hashed of the header of safetensors: names, types, shapes and offsets.
MAX_HEADER_BYTES = 1 << 20

BLOB, COMMIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
# A model in the hub's cache. With HF_HUB_OFFLINE engines replace a model's name by this path.
SNAPSHOT = re.compile("(?:.*/)?models--([^/]+)/snapshots/([0-9a-f]{40})/?")


class HubSnapshot(NamedTuple):
    """The name and the commit of a model in the hub's cache; both empty if it is elsewhere."""

    name: str = ""
    commit: str = ""


def hub_snapshot(path: str) -> HubSnapshot:
    """The cache may be anywhere on each host, so its path identifies nothing."""
    match = SNAPSHOT.fullmatch(path)
    return HubSnapshot(match[1].replace("--", "/"), match[2]) if match else HubSnapshot()


def digest(*texts: str) -> str:
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()


def file_versions(path: str) -> Iterator[str]:
    """The files of a local model, each with its version; nothing for a model of the hub.

    Of a directory, those that can change KV. A path of one file names it, whatever its suffix.
    """
    local = Path(path)
    if path and local.exists() and not hub_snapshot(path).commit:
        for file in sorted(local.iterdir()) if local.is_dir() else [local]:
            if (file == local or file.suffix in MODEL_SUFFIXES) and file.is_file():
                stat = file.stat()
                small = stat.st_size <= MAX_HASHED_BYTES
                yield f"{file.name} {stat.st_size} {_hash_file(file) if small else _version(file)}"


def identify_files(path: str) -> str:
    """A text that changes with the files of a local model or adapter; "" if it has none."""
    try:
        files = tuple(file_versions(str(Path(path).expanduser())))
    except OSError:  # they are being replaced
        return ""
    return digest(*files) if files else hub_snapshot(path).commit


def _version(file: Path) -> str:
    """The file's hash if it is named so, as in the hub's cache; else its time and its samples."""
    blob = file.resolve()
    named = blob.parent.name == "blobs" and BLOB.fullmatch(blob.name)
    return blob.name if named else f"{file.stat().st_mtime_ns} {_hash_samples(file)}"


def _hash_samples(file: Path) -> str:
    """A hash of the header of safetensors, and of samples of the data, at equal distances."""
    found = hashlib.blake2b(digest_size=16)
    try:
        with file.open("rb", buffering=0) as opened:
            last = os.fstat(opened.fileno()).st_size - SAMPLE_BYTES
            start = 0
            if file.suffix == ".safetensors":  # 8 bytes: the size of the header, little-endian
                data = 8 + int.from_bytes(opened.read(8), "little")
                start = data if data <= last else 0  # else it is not a safetensors file
                found.update(os.pread(opened.fileno(), min(start, MAX_HEADER_BYTES), 0))
            for number in range(SAMPLES):
                at = start + (last - start) * number // (SAMPLES - 1)
                found.update(os.pread(opened.fileno(), SAMPLE_BYTES, at))
    except OSError:
        return ""  # the engine cannot read it either
    return found.hexdigest()


def _hash_file(file: Path) -> str:
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""  # the engine cannot read it either
