"""Encrypted tiers: key files, and what whoever writes to a disk or to a store can achieve."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tier_config import DiskTierConfig
from kvferry.daemon.tiers.base import Result, block_checksum
from kvferry.daemon.tiers.block_memory import PAGE
from kvferry.daemon.tiers.disk import command
from kvferry.daemon.tiers.disk.slab import SlotHeader, decode_header
from kvferry.daemon.tiers.encryption import check_encryption, cipher_of
from kvferry.daemon.tiers.mooncake.trailer import TRAILER_BYTES
from kvferry.proto.errors import Code, Refused
from kvferry.testing.tier_subjects import (
    NAMESPACE,
    PoolMemory,
    ProcessSubject,
    content_of,
    key_of,
    open_subject,
)
from support.mooncake_hosts import NAME, ModelHost
from support.object_store_model import ObjectStoreModel

from .disk_fixtures import SIZE, KillableDisk, disk_setup, fetch_all, put_all
from .encryption_keys import new_key

OK, MISS, CORRUPT = Result.OK, Result.MISS, Result.CORRUPT
MANY = range(8)


# Key files


def refusal(key_file: str) -> str:
    with pytest.raises(Refused) as refused:
        check_encryption([DiskTierConfig(path="/tier", size="1GiB", key_file=key_file)])
    assert refused.value.code == Code.BAD_CONFIG
    return refused.value.message


@pytest.mark.parametrize(
    ("nbytes", "mode", "expected"),
    [
        (32, 0o440, r"has mode 0440, which is not private; set mode 0400"),
        (32, 0o404, r"has mode 0404"),
        (31, 0o400, r"has 31 bytes, not 32; create it with: head -c 32 /dev/urandom"),
        (65, 0o600, r"has 65 bytes, not 32"),
        (0, 0o600, r"has 0 bytes, not 32"),
    ],
)
def test_a_key_file_that_is_not_private_or_not_a_key_is_refused(
    tmp_path: Path, nbytes: int, mode: int, expected: str
) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(nbytes))
    path.chmod(mode)
    assert re.search(rf"^tiers\.disk\.key_file = '{path}' {expected}", refusal(str(path)))


def test_a_key_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    advice = "name a file that the daemon's user can read"
    assert refusal(str(tmp_path / "none")).endswith(f"(No such file or directory); {advice}")
    assert advice in refusal(str(tmp_path))
    assert advice in refusal("/dev/null")


def test_a_name_without_a_slash_is_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert "$CREDENTIALS_DIRECTORY is not set; add LoadCredential=" in refusal("key")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert "add LoadCredential= with this name to the unit" in refusal("key")
    Path(new_key(tmp_path)).chmod(0o440)  # as systemd does
    cipher = cipher_of("key", "tiers.disk.key_file")("store")
    assert cipher is not None
    assert cipher.key_id


def test_a_missing_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "kvferry.daemon.tiers.block_cipher", None)
    message = refusal(new_key(tmp_path))
    assert message.startswith("tiers.disk.key_file is set, but cryptography cannot be imported")
    assert message.endswith("pip install '.[encryption]' in a checkout of kvferry")


# Disk


@pytest.fixture
def encrypted(pool: PoolMemory, tmp_path: Path) -> Iterator[KillableDisk]:
    disk = KillableDisk(pool, tmp_path / "tier", key_file=new_key(tmp_path))
    put_all(disk, MANY)
    yield disk
    disk.close()


def other_key(disk: KillableDisk) -> str:
    return new_key(disk.root.parent, "other")


def test_nothing_of_a_block_is_on_disk(encrypted: KillableDisk) -> None:
    encrypted.kill()
    found = b"".join(path.read_bytes() for path in encrypted.root.rglob("*") if path.is_file())
    for number in MANY:
        content = content_of(number, encrypted.pool.block_bytes).tobytes()
        assert not any(content[at : at + 8] in found for at in range(0, len(content), 64))
    encrypted.open()
    assert fetch_all(encrypted, MANY) == [OK] * len(MANY)


@pytest.mark.parametrize("keys", ["other", "none", "first"])
def test_blocks_of_another_key_are_dropped_at_the_start(encrypted: KillableDisk, keys: str) -> None:
    """Also when the tier has a key for the first time: nothing in the clear stays there."""
    before, after = {
        "other": (encrypted.key_file, other_key(encrypted)),
        "none": (encrypted.key_file, ""),
        "first": ("", encrypted.key_file),
    }[keys]
    encrypted.key_file = before
    encrypted.restart()
    put_all(encrypted, MANY)
    assert fetch_all(encrypted, MANY) == [OK] * len(MANY)
    encrypted.key_file = after
    encrypted.restart()
    assert not list(encrypted.root.glob("*/slab-*"))
    assert encrypted.contains(MANY) == [False] * len(MANY)
    assert fetch_all(encrypted, MANY) == [MISS] * len(MANY)
    put_all(encrypted, MANY)
    encrypted.restart()
    assert fetch_all(encrypted, MANY) == [OK] * len(MANY)


class Slots:
    """The slots of a store in its first slab file, by the number of their key."""

    def __init__(self, root: Path, pool: PoolMemory, store: str = NAMESPACE) -> None:
        self._slab, self._nbytes = root / store / "slab-00000", pool.block_bytes
        data, self._at = self._slab.read_bytes(), dict[int, int]()
        for at in range(0, len(data), PAGE + self._nbytes):
            if (header := decode_header(memoryview(data)[at : at + PAGE])) is not None:
                self._at[int.from_bytes(header.key[:8], "big")] = at

    def read(self, number: int) -> tuple[SlotHeader, bytes]:
        data = self._slab.read_bytes()[self._at[number] :]
        header = decode_header(memoryview(data)[:PAGE])
        assert header is not None
        return header, data[PAGE : PAGE + self._nbytes]

    def write(self, number: int, header: SlotHeader, block: bytes) -> None:
        """With the CRC that belongs to the header."""
        with self._slab.open("r+b") as file:
            file.seek(self._at[number])
            file.write(header.encode().ljust(PAGE, b"\0") + block)

    def flip(self, number: int, bit: int) -> None:
        with self._slab.open("r+b") as file:
            file.seek(self._at[number] + bit // 8)
            flipped = file.read(1)[0] ^ 1 << bit % 8
            file.seek(-1, 1)
            file.write(bytes([flipped]))


def slots_of(disk: KillableDisk, store: str = NAMESPACE) -> Slots:
    return Slots(disk.root, disk.pool, store)


def reopen(disk: KillableDisk, loses_hints: bool) -> None:
    disk.lose_hints() if loses_hints else disk.kill()
    disk.open()


def another_seal(slots: Slots) -> None:
    slots.write(1, slots.read(1)[0]._replace(seal=slots.read(2)[0].seal), slots.read(1)[1])


def another_block(slots: Slots) -> None:
    slots.write(1, slots.read(1)[0], slots.read(2)[1])


def another_key(slots: Slots) -> None:
    header, block = slots.read(2)
    slots.write(1, header._replace(key=key_of(1)), block)


def another_checksum_in_the_clear(slots: Slots) -> None:
    """Of contents that the attacker has chosen."""
    header, block = slots.read(1)
    chosen = content_of(9, len(block)).tobytes()
    checksum = block_checksum(key_of(1), memoryview(chosen))
    slots.write(1, header._replace(checksum=checksum, seal=b""), chosen)


@pytest.mark.parametrize("loses_hints", [False, True])
@pytest.mark.parametrize(
    "forge", [another_seal, another_block, another_key, another_checksum_in_the_clear]
)
def test_a_forged_slot_is_a_miss(
    encrypted: KillableDisk, forge: Callable[[Slots], None], loses_hints: bool
) -> None:
    forge(slots_of(encrypted))
    reopen(encrypted, loses_hints)
    assert encrypted.fetch([1])[0] in (MISS, CORRUPT)
    assert encrypted.fetch([3]) == [OK]


@pytest.mark.parametrize("before", [StoreName(NAMESPACE, "c", 6), StoreName("b" * 16, "c", 7)])
def test_a_block_of_another_epoch_or_namespace_is_a_miss(
    encrypted: KillableDisk, before: StoreName
) -> None:
    store = str(StoreName(NAMESPACE, "c", 7))
    for name in (str(before), store):
        assert encrypted.put([1, 2], name) == [OK, OK]
    header, block = slots_of(encrypted, str(before)).read(1)
    slots_of(encrypted, store).write(1, header._replace(namespace=store), block)
    reopen(encrypted, loses_hints=True)
    assert encrypted.fetch([1, 2], str(before)) == [OK, OK]
    assert encrypted.fetch([1], store)[0] in (MISS, CORRUPT)
    assert encrypted.fetch([2], store) == [OK]


def test_ciphertext_is_never_taken_for_a_block(encrypted: KillableDisk) -> None:
    """Its checksum is right, and `meta` states that the store is not encrypted."""
    encrypted.kill()
    meta = encrypted.root / NAMESPACE / "meta"
    fields = msgspec.json.decode(meta.read_bytes())
    assert fields.pop("key_id")
    meta.write_bytes(msgspec.json.encode(fields))
    encrypted.key_file = ""
    encrypted.open()
    assert fetch_all(encrypted, MANY) == [MISS] * len(MANY)


def test_a_corrupt_block_is_counted_and_dropped(tmp_path: Path, pool: PoolMemory) -> None:
    """By the process of the tier."""
    setup = disk_setup(tmp_path / "tier", SIZE, key_file=new_key(tmp_path))
    with open_subject(setup, pool) as tier:
        assert isinstance(tier, ProcessSubject)
        assert tier.put([1, 2]) == [OK, OK]
        Slots(tmp_path / "tier", pool).flip(1, 8 * PAGE)
        assert tier.fetch([1, 2]) == [CORRUPT, OK]
        assert tier.client.counts["checksum_failures"] == 1
        assert tier.contains([1, 2]) == [False, True]
        assert tier.put([1]) == [OK]
        assert tier.fetch([1]) == [OK]


def test_encrypted_blocks_are_verified_without_the_key(encrypted: KillableDisk) -> None:
    encrypted.kill()
    (verified,) = command.verify(encrypted.root, lambda _: None)
    assert (verified.good, verified.bad) == (len(MANY), 0)
    slots_of(encrypted).flip(5, 8 * PAGE + 9)
    (verified,) = command.verify(encrypted.root, lambda _: None)
    assert (verified.good, verified.bad) == (len(MANY) - 1, 1)
    encrypted.open()


# A store that hosts share


ONE, TWO = b"\1" * 12, b"\2" * 12


def objects_of(model: ObjectStoreModel, key: bytes) -> list[str]:
    return [name for name in model.objects if name.endswith(f"/{key.hex()}")]


def settled_host(model: ObjectStoreModel, number: int, key_file: str) -> ModelHost:
    host = ModelHost(model, number, 5, cipher_of(key_file, "tiers.mooncake.key_file"))
    assert host.settle() == 5
    return host


def test_hosts_with_one_key_share_and_others_do_not_find_blocks(tmp_path: Path) -> None:
    """Nor do they remove each other's."""
    model, first, second = ObjectStoreModel(), new_key(tmp_path), new_key(tmp_path, "second")
    hosts = [settled_host(model, n, key) for n, key in enumerate([first, second, ""])]
    for number, host in enumerate(hosts):
        assert host.find(ONE) is None
        assert host.put(ONE) is OK
        assert len(objects_of(model, ONE)) == number + 1
    assert [host.find(ONE) for host in hosts] == [5, 5, 5]
    assert settled_host(model, 3, first).find(ONE) == 5
    in_clear = (5).to_bytes(8, "little")
    assert [data[:8] == in_clear for data in model.objects.values() if len(data) > 64] == [
        False,
        False,
        True,
    ]


def test_a_flipped_bit_in_an_object_is_a_miss(tmp_path: Path) -> None:
    model = ObjectStoreModel()
    host = settled_host(model, 0, new_key(tmp_path))
    host.put(ONE)
    (name,) = objects_of(model, ONE)
    good = model.objects[name]
    assert host.find(ONE) == 5
    assert not any(good[8 + 24 : 8 + 32])  # the checksum is encrypted
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        model.objects[name] = bytes(data)
        is_in_block_or_seal = bit // 8 not in range(8, 8 + TRAILER_BYTES)
        assert host.find(ONE) in ((None,) if is_in_block_or_seal else (None, 5)), bit
    model.objects[name] = good
    assert host.find(ONE) == 5


def test_swapped_contents_of_objects_are_misses(tmp_path: Path) -> None:
    """Also with the trailer of the right name."""
    model = ObjectStoreModel()
    host = settled_host(model, 0, new_key(tmp_path))
    host.put(ONE)
    host.put(TWO)
    (one,), (two,) = objects_of(model, ONE), objects_of(model, TWO)
    first, second = model.objects[one], model.objects[two]
    assert NAME in one
    model.objects[one], model.objects[two] = second, first
    assert (host.find(ONE), host.find(TWO)) == (None, None)
    model.objects[one] = second[:8] + first[8:72] + second[72:]
    assert host.find(ONE) is None
