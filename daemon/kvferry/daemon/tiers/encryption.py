"""Encryption of tiers: the operator's key file, and the ciphers of stores.

The daemon checks the key files when it starts; the process of a tier reads its own.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvferry.daemon.tier_config import TierConfig
from kvferry.proto.errors import Code, Refused

if TYPE_CHECKING:
    from kvferry.daemon.tiers.block_cipher import BlockCipher

KEY_BYTES = 32
# What a tier stores beside an encrypted block: the salt, its encrypted checksum, and the tag.
SALT_BYTES, TAG_BYTES = 32, 16
SEAL_BYTES = SALT_BYTES + 8 + TAG_BYTES
# Stores whose ciphers are kept.
MAX_CIPHERS = 1024

# The cipher of a store, by its name; None if the tier is not encrypted.
CipherOf: TypeAlias = Callable[[str], "BlockCipher | None"]


def check_encryption(tiers: Sequence[TierConfig]) -> None:
    """Raise Refused (BAD_CONFIG) if a tier has a key file that cannot be used."""
    for tier in tiers:
        cipher_of(tier.key_file, f"tiers.{tier.name}.key_file")


def cipher_of(key_file: str, setting: str) -> CipherOf:
    """The ciphers of a tier. key_file: empty if it is not encrypted. setting: its key in the
    configuration. Raises Refused (BAD_CONFIG)."""
    if not key_file:
        return no_cipher
    try:
        from kvferry.daemon.tiers.block_cipher import BlockCipher
    except ImportError as error:
        message = (
            f"{setting} is set, but cryptography cannot be imported: {error}; "
            "pip install '.[encryption]' in a checkout of kvferry"
        )
        raise Refused(Code.BAD_CONFIG, message, str(error)) from error
    key = _read_key(key_file, setting)
    return lru_cache(MAX_CIPHERS)(lambda store: BlockCipher(key, store))


def no_cipher(_store: str) -> None:
    """The CipherOf of a tier that is not encrypted."""


def key_id_of(cipher: BlockCipher | None) -> str:
    """Empty if there is no cipher."""
    return "" if cipher is None else cipher.key_id


def _read_key(key_file: str, setting: str) -> bytes:
    path, is_credential = _path_of(key_file, setting)
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            key = file.read(KEY_BYTES)
    except OSError as error:
        remedy = (
            "add LoadCredential= with this name to the unit"
            if is_credential
            else "name a file that the daemon's user can read"
        )
        raise _refuse(setting, path, f"cannot be read ({error.strerror}); {remedy}") from error
    # systemd gives a credential mode 0440 and an access list, in a directory of the service alone.
    if status.st_mode & 0o077 and not is_credential:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise _refuse(setting, path, f"has mode {mode}, which is not private; set mode 0400")
    if status.st_size != KEY_BYTES:
        raise _refuse(
            setting,
            path,
            f"has {status.st_size} bytes, not {KEY_BYTES}; "
            f"create it with: head -c {KEY_BYTES} /dev/urandom",
        )
    return key


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO would wait for a writer


def _path_of(key_file: str, setting: str) -> tuple[Path, bool]:
    """The path of a key file, and whether it is a credential of systemd: a name without a slash."""
    if "/" in key_file:
        return Path(key_file), False
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        problem = (
            "is the name of a systemd credential, but $CREDENTIALS_DIRECTORY is not set; add "
            "LoadCredential= with this name to the unit, or set the path of a file"
        )
        raise _refuse(setting, key_file, problem)
    return Path(directory, key_file), True


def _refuse(setting: str, path: Path | str, problem: str) -> Refused:
    return Refused(Code.BAD_CONFIG, f"{setting} = {str(path)!r} {problem}", str(path))
