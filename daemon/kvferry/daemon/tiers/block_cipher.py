"""Encrypts host blocks that leave the host pool for a tier, and decrypts those that return.

AES-256-GCM. All keys are derived from the one in the operator's key file:

    namespace key, key id   HKDF-SHA256(key file, info: name of the namespace)
    key of a write          HMAC-SHA256(namespace key, salt: 32 random bytes)

The name of a namespace is a hash of its fingerprint, which has the tenant's salt. Each write has a
key of its own, which encrypts the checksum and the block in one message, with nonce 0. So no nonce
is used twice under one key, also not after a restart or on a copy of the disk: nothing is counted.
The associated data are the name of the store, which has the epoch, and the key of the block: a
block at another place does not decrypt. A tier stores the seal beside the block, which keeps its
size. Used in the process of a tier, on any thread; encryption.py imports it if a key is configured.
"""

from __future__ import annotations

import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.encryption import KEY_BYTES, SALT_BYTES, SEAL_BYTES, TAG_BYTES

# Bytes of a checksum, and of a key id.
_WORD = 8
# Each key encrypts one message.
_NONCE = bytes(12)
_INFO = b"kvferry tier 1 "


class BlockCipher:
    """Of one store. key: the contents of the key file.

    key_id: of the namespace; blocks with another one cannot be decrypted. It is no secret.
    """

    def __init__(self, key: bytes, store: str) -> None:
        info = _INFO + StoreName.parse(store).namespace.encode()
        derived = HKDF(SHA256(), KEY_BYTES + _WORD, salt=None, info=info).derive(key)
        self._key, self.key_id = derived[:KEY_BYTES], derived[KEY_BYTES:].hex()
        name = store.encode()
        self._store = len(name).to_bytes(_WORD, "little") + name

    def encrypt(self, key: bytes, checksum: int, block: memoryview, target: memoryview) -> bytes:
        """Encrypt the block of a key to `target`, and its checksum. Returns the seal."""
        salt = os.urandom(SALT_BYTES)
        encryptor = Cipher(self._algorithm(salt), GCM(_NONCE)).encryptor()
        encryptor.authenticate_additional_data(self._store + key)
        hidden = encryptor.update(checksum.to_bytes(_WORD, "little"))
        encryptor.update_into(block, target)
        encryptor.finalize()
        return salt + hidden + encryptor.tag

    def decrypt(self, key: bytes, seal: bytes, block: memoryview, target: memoryview) -> int | None:
        """Decrypt the block of a key to `target`. Returns its checksum.

        None: this is not what `encrypt` made for this key, store and key file. The target is
        undefined then.
        """
        if len(seal) != SEAL_BYTES:
            return None
        salt, hidden, tag = seal[:SALT_BYTES], seal[SALT_BYTES:-TAG_BYTES], seal[-TAG_BYTES:]
        decryptor = Cipher(self._algorithm(salt), GCM(_NONCE, tag)).decryptor()
        decryptor.authenticate_additional_data(self._store + key)
        checksum = decryptor.update(hidden)
        decryptor.update_into(block, target)
        try:
            decryptor.finalize()
        except InvalidTag:
            return None
        return int.from_bytes(checksum, "little")

    def _algorithm(self, salt: bytes) -> AES:
        return AES(hmac.digest(self._key, salt, "sha256"))
