"""Key files of encrypted tiers."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.daemon.tiers.encryption import KEY_BYTES


def new_key(directory: Path, name: str = "key") -> str:
    """Write a file with a random key. Returns its path."""
    path = directory / name
    path.write_bytes(os.urandom(KEY_BYTES))
    path.chmod(0o400)
    return str(path)
