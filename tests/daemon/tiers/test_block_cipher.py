"""The cipher of a store: what it decrypts, and what it does not."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.block_cipher import BlockCipher
from kvferry.daemon.tiers.encryption import SEAL_BYTES

MASTER, KEY, CHECKSUM = bytes(range(32)), b"key", 0xFEDC_BA98_7654_3210
STORE = StoreName("0123456789abcdef", "c", 7)
BLOCK = os.urandom(4097)


def encrypt(cipher: BlockCipher, block: bytes = BLOCK) -> tuple[bytes, bytes]:
    """The seal and the ciphertext."""
    target = bytearray(len(block))
    seal = cipher.encrypt(KEY, CHECKSUM, memoryview(block), memoryview(target))
    return seal, bytes(target)


def decrypt(
    cipher: BlockCipher, seal: bytes, block: bytes, key: bytes = KEY
) -> tuple[int, bytes] | None:
    """The checksum and the block."""
    target = bytearray(len(block))
    checksum = cipher.decrypt(key, seal, memoryview(block), memoryview(target))
    return None if checksum is None else (checksum, bytes(target))


CIPHER = BlockCipher(MASTER, str(STORE))
SEAL, CIPHERTEXT = encrypt(CIPHER)


@given(st.binary(min_size=1, max_size=200))
def test_a_block_and_its_checksum_are_decrypted(block: bytes) -> None:
    seal, ciphertext = encrypt(CIPHER, block)
    assert len(seal) == SEAL_BYTES
    assert len(ciphertext) == len(block)
    # Another object, as in another process or on another host.
    assert decrypt(BlockCipher(MASTER, str(STORE)), seal, ciphertext) == (CHECKSUM, block)


@given(st.integers(0, 8 * (SEAL_BYTES + len(BLOCK)) - 1))
def test_a_flipped_bit_is_not_decrypted(bit: int) -> None:
    data = bytearray(SEAL + CIPHERTEXT)
    data[bit // 8] ^= 1 << bit % 8
    assert decrypt(CIPHER, bytes(data[:SEAL_BYTES]), bytes(data[SEAL_BYTES:])) is None


@pytest.mark.parametrize(
    "other",
    [
        STORE._replace(namespace="fedcba9876543210"),
        STORE._replace(composition="d"),
        STORE._replace(epoch=8),
        STORE._replace(epoch=0),
    ],
    ids=str,
)
def test_a_block_of_another_store_is_not_decrypted(other: StoreName) -> None:
    assert decrypt(BlockCipher(MASTER, str(other)), SEAL, CIPHERTEXT) is None


def test_a_block_of_another_key_or_key_file_is_not_decrypted() -> None:
    assert decrypt(CIPHER, SEAL, CIPHERTEXT, b"kez") is None
    assert decrypt(BlockCipher(bytes(32), str(STORE)), SEAL, CIPHERTEXT) is None
    seal, ciphertext = encrypt(CIPHER)
    assert decrypt(CIPHER, seal, CIPHERTEXT) is None
    assert decrypt(CIPHER, b"", ciphertext) is None


def test_each_write_has_another_key() -> None:
    """So equal blocks do not look equal, and no nonce is used twice under one key."""
    written = [encrypt(CIPHER) for _ in range(64)]
    for part in (slice(0, 32), slice(32, 40), slice(40, SEAL_BYTES)):
        assert len({seal[part] for seal, _ in written}) == 64
    assert len({ciphertext[:16] for _, ciphertext in written}) == 64


def test_a_key_id_is_of_a_key_file_and_a_namespace() -> None:
    def key_id(master: bytes, name: StoreName) -> str:
        return BlockCipher(master, str(name)).key_id

    other = STORE._replace(namespace="fedcba9876543210")
    assert key_id(MASTER, STORE._replace(epoch=9, composition="d")) == CIPHER.key_id
    assert len({CIPHER.key_id, key_id(MASTER, other), key_id(bytes(32), STORE)}) == 3
