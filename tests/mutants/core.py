"""Mutants of the daemon's core: daemon/kvferry/daemon/core."""

from __future__ import annotations

from mutants.source_mutant import SourceMutant

CORE = "daemon/kvferry/daemon/core"
TESTS = "tests/daemon/core"

MUTANTS = (
    SourceMutant(
        "a load of a key from before a reset is answered",
        f"{CORE}/keyed_transfers.py",
        "elif namespace.is_behind and host.keys:",
        "elif False:",
        (f"{TESTS}/test_resets.py", f"{TESTS}/test_namespace_reset.py"),
    ),
    SourceMutant(
        "a load of more sub-blocks than are stored is accepted",
        f"{CORE}/keyed_transfers.py",
        "stored[0] <= wanted[0] < wanted[1] <= stored[1]:",
        "stored[0] <= wanted[0] < wanted[1]:",
        (f"{TESTS}/test_namespaces.py", f"{TESTS}/test_namespace_registrations.py"),
    ),
    SourceMutant(
        "a load overtakes the store of its host block",
        f"{CORE}/hazards.py",
        """                largest(self._gpu[other][blocks.gpu_slots]),
                largest(self._host[other][blocks.host_blocks]),
""",
        """                largest(self._gpu[other][blocks.gpu_slots]),
                0,
""",
        (f"{TESTS}/test_hazards.py",),
    ),
    SourceMutant(
        "credits of ended jobs are not returned",
        f"{CORE}/transfers.py",
        "            self._used_credits[job.session, job.direction] -= 1\n",
        "",
        (f"{TESTS}/test_transfers.py",),
    ),
    SourceMutant(
        "a load of a block that was found damaged meanwhile succeeds",
        f"{CORE}/transfers.py",
        "if outcome is Outcome.DONE and job.error is not None:",
        "if False:",
        (f"{TESTS}/test_block_states.py",),
    ),
    SourceMutant(
        "a job id is used twice at a time",
        f"{CORE}/transfers.py",
        "if parts and not (message.part and parts[0].session == session):",
        "if parts and not message.part and parts[0].session == session:",
        (f"{TESTS}/test_transfers.py",),
    ),
    SourceMutant(
        "a block is loaded although its store has failed",
        f"{CORE}/block_states.py",
        "self._states[own] = _LOADABLE if done else _UNDEFINED",
        "self._states[own] = _LOADABLE",
        (f"{TESTS}/test_block_states.py",),
    ),
    SourceMutant(
        "the end of an older store makes the blocks of a newer one loadable",
        f"{CORE}/block_states.py",
        "own = blocks.sub_blocks[self._states[blocks.sub_blocks] == serial]",
        "own = blocks.sub_blocks",
        (f"{TESTS}/test_block_states.py",),
    ),
    SourceMutant(
        "blocks of ended loads stay pinned",
        f"{CORE}/cache/cache.py",
        "        self._jobs.remove(pins)\n        self._blocks.release_blocks(pins.blocks)\n",
        "        self._jobs.remove(pins)\n",
        (f"{TESTS}/cache/test_cache.py",),
    ),
    SourceMutant(
        "a store that needs the last block is refused",
        f"{CORE}/cache/cache.py",
        "if needed > self.table.idle:",
        "if needed >= self.table.idle:",
        (f"{TESTS}/cache/test_cache.py",),
    ),
    SourceMutant(
        "a checksum of bytes that were overwritten is committed",
        f"{CORE}/block_table.py",
        "same = self.lines.unchanged(blocks, versions) & self.among(blocks, *UNCOMMITTED)",
        "same = self.among(blocks, *UNCOMMITTED)",
        (f"{TESTS}/test_block_table.py",),
    ),
    SourceMutant(
        "an engine of another user gets the host memory of one with its name",
        f"{CORE}/regions.py",
        "old.contents == contents and old.uid == uid",
        "old.contents == contents",
        (f"{TESTS}/test_block_states.py",),
    ),
    SourceMutant(
        "a reset waits without end for a store that cannot be reached",
        f"{CORE}/resets.py",
        "self._is_published(reset.namespace.name, reset.epoch) or now >= reset.until",
        "self._is_published(reset.namespace.name, reset.epoch)",
        (f"{TESTS}/test_resets.py",),
    ),
    SourceMutant(
        "a reset is undone by the epoch of a host whose clock is ahead",
        f"{CORE}/resets.py",
        "if self._epochs.is_unpublished(name):",
        "if False:",
        (f"{TESTS}/test_resets.py",),
    ),
    SourceMutant(
        "blocks from before a reset are promoted after it",
        f"{CORE}/promotions.py",
        "if namespace.store_name != search.store or namespace.is_behind:",
        "if namespace.is_behind:",
        (f"{TESTS}/test_promotions.py",),
    ),
    SourceMutant(
        "after some promotions nothing is promoted any more",
        f"{CORE}/promotions.py",
        "        fetch.namespace.promoting -= fetch.blocks.size\n",
        "",
        (f"{TESTS}/test_promotions.py",),
    ),
    SourceMutant(
        "a block whose write into a tier has failed is not written again",
        f"{CORE}/cache/tier_access.py",
        "        self._blocks.marks.set_unwritten(blocks[~done], tier)\n",
        "",
        (f"{TESTS}/cache/test_tier_writes.py", f"{TESTS}/test_writes.py"),
    ),
    SourceMutant(
        "a store writes a host block twice",
        f"{CORE}/layout.py",
        '            check_unique(hosts, self.host_blocks, "host block")\n',
        "            pass\n",
        (f"{TESTS}/test_layout.py",),
    ),
    SourceMutant(
        "keys that are retained again for a shorter time are released early",
        f"{CORE}/retention.py",
        "block, max(due, now + seconds)",
        "block, now + seconds",
        (f"{TESTS}/test_hints.py",),
    ),
    SourceMutant(
        "a block that could not be packed is found",
        f"{CORE}/cache/cache.py",
        "stored = ~np.isin(blocks, lost)",
        "stored = np.isin(blocks, blocks)",
        ("tests/flow/test_packing.py",),
    ),
    SourceMutant(
        "a host block counts as packed if its first GPU block is",
        f"{CORE}/transfers.py",
        "(report.unpackable - layout.region_start) // layout.host_block_bytes)",
        "(report.unpackable - layout.region_start) / layout.host_block_bytes)",
        ("tests/flow/test_packing.py",),
    ),
)
