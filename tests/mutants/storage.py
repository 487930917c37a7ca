"""Mutants of what survives a restart, of siblings, and of tiers."""

from __future__ import annotations

from mutants.source_mutant import SourceMutant

DAEMON = "daemon/kvferry/daemon"
KEPT, SIBLINGS, TIERS = "tests/daemon/persistence", "tests/daemon/siblings", "tests/daemon/tiers"

MUTANTS = (
    SourceMutant(
        "a block that is overwritten while it is checked counts as damaged",
        f"{DAEMON}/persistence/block_checks.py",
        "same = region.table.unchanged(blocks, versions)",
        "same = np.ones(blocks.size, np.bool_)",
        (f"{KEPT}/test_block_checks.py",),
    ),
    SourceMutant(
        "a damaged record of a region is restored",
        f"{DAEMON}/persistence/table_file.py",
        "if zlib.crc32(data) != crc:",
        "if False:",
        (f"{KEPT}/test_table_file.py",),
    ),
    SourceMutant(
        "a kill during an update leaves no valid record of a region",
        f"{DAEMON}/persistence/table_file.py",
        """        self._file[at : at + len(data)] = data
        self._head.write(NUMBER_WORD, other)
""",
        """        self._head.write(NUMBER_WORD, other)
        self._file[at : at + len(data)] = data
""",
        (f"{KEPT}/test_table_file.py",),
    ),
    SourceMutant(
        "a kill during a reset leaves its epoch as one that shared stores have",
        f"{DAEMON}/persistence/epoch_page.py",
        "words.write(slot + 2, epoch)  # before it: nobody may miss that it is unpublished\n"
        "                words.write(slot + 1, epoch)\n",
        "words.write(slot + 1, epoch)\n                words.write(slot + 2, epoch)\n",
        (f"{KEPT}/test_epoch_page.py",),
    ),
    SourceMutant(
        "a power cut undoes a reset that was done",
        f"{DAEMON}/persistence/epoch_page.py",
        "        os.fdatasync(self._descriptor)  # mmap.flush would hold the GIL\n",
        "        pass\n",
        (f"{KEPT}/test_epoch_page.py",),
    ),
    SourceMutant(
        "a block in the place of another one matches its checksum",
        f"{DAEMON}/persistence/checksum_worker.py",
        "seeds = [xxhash.xxh3_64_intdigest(key) for key in request.keys] or blocks",
        "seeds = [0] * len(blocks)",
        (f"{KEPT}/test_checksum_client.py",),
    ),
    SourceMutant(
        "a region that was freed is back after a restart",
        f"{DAEMON}/persistence/region_store.py",
        "        file.mark_void()\n        self._fd_store.remove_fd(name)\n",
        "        file.mark_void()\n",
        (f"{KEPT}/test_region_store.py",),
    ),
    SourceMutant(
        "a block behind the memory that a sibling lends is read",
        f"{DAEMON}/siblings/windows.py",
        "fits = ends <= window.end",
        "fits = ends > 0",
        (f"{SIBLINGS}/test_windows.py",),
    ),
    SourceMutant(
        "a sibling's memory is unmapped while a load reads it",
        f"{DAEMON}/siblings/windows.py",
        "if window.closed and not window.holds and window.number in self._windows:",
        "if window.closed and window.number in self._windows:",
        (f"{SIBLINGS}/test_windows.py",),
    ),
    SourceMutant(
        "memory is mapped that a sibling can shrink",
        f"{DAEMON}/siblings/windows.py",
        """        check_sealed(chunk, "the sibling's pool memory")\n""",
        "        pass\n",
        (f"{SIBLINGS}/test_windows.py",),
    ),
    SourceMutant(
        "descriptors of a region that changed meanwhile stay open",
        f"{DAEMON}/siblings/peers.py",
        "            for descriptor in held:\n                os.close(descriptor)\n",
        "            held.clear()\n",
        (f"{SIBLINGS}/test_peers.py",),
    ),
    SourceMutant(
        "a slot that was read once never gets another key",
        f"{DAEMON}/tiers/disk/namespace_store.py",
        "            self.catalog.table.end_read(slot)\n",
        "",
        (f"{TIERS}/test_disk_recovery.py",),
    ),
    SourceMutant(
        "a damaged header of a slot is believed",
        f"{DAEMON}/tiers/disk/slab.py",
        "if (zlib.crc32(data),) != _CRC.unpack_from(page, end):",
        "if False:",
        (f"{TIERS}/test_disk_damage.py",),
    ),
    SourceMutant(
        "a tier's block that does not match its checksum is loaded",
        f"{DAEMON}/tiers/tier_worker.py",
        "if result is Result.OK and found.checksum != block_checksum(",
        "if result is None and found.checksum != block_checksum(",
        (f"{TIERS}/test_tier_client.py::test_bytes_that_do_not_match_their_checksum_are_dropped",),
    ),
    SourceMutant(
        "a slot is overwritten while it is read",
        f"{DAEMON}/tiers/disk/slot_table.py",
        "[each for each in coldest if each not in self._readers][:wanted]",
        "coldest[:wanted]",
        (f"{TIERS}/test_slot_table.py",),
    ),
    SourceMutant(
        "a power cut leaves a small file of the tier without its contents",
        f"{DAEMON}/tiers/durable_files.py",
        "        os.fsync(descriptor)\n",
        "",
        (f"{TIERS}/test_durable_files.py",),
    ),
    SourceMutant(
        "an encrypted block from before a reset is decrypted after it",
        f"{DAEMON}/tiers/block_cipher.py",
        'self._store = len(name).to_bytes(_WORD, "little") + name',
        'self._store = len(name).to_bytes(_WORD, "little")',
        (f"{TIERS}/test_block_cipher.py",),
    ),
    SourceMutant(
        "an object with the block of another key is loaded",
        f"{DAEMON}/tiers/mooncake/trailer.py",
        "return checksum if fields == expected else None",
        "return checksum if fields[:3] == expected[:3] else None",
        (f"{TIERS}/test_mooncake_epochs.py",),
    ),
    SourceMutant(
        "blocks are loaded that another host has reset in the store",
        f"{DAEMON}/tiers/mooncake/tier.py",
        "        if not is_valid:\n",
        "        if False:\n",
        (f"{TIERS}/test_mooncake_epochs.py",),
    ),
    SourceMutant(
        "a tier is kept in a directory that other users can write",
        f"{DAEMON}/tiers/disk/root_files.py",
        "if found.st_uid != user or found.st_mode & 0o022:",
        "if found.st_uid != user:",
        (f"{TIERS}/test_disk_root.py",),
    ),
)
