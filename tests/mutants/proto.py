"""Mutants of messages, shared memory and CUDA calls: proto/."""

from __future__ import annotations

from mutants.source_mutant import SourceMutant

MUTANTS = (
    SourceMutant(
        "a message beyond the limit is decoded",
        "proto/kvferry/proto/codec.py",
        "        _check_size(data, self._most_bytes)\n",
        "",
        ("tests/proto/test_codec.py",),
    ),
    SourceMutant(
        "a message of int32 ids has twice the ids that a daemon handles at once",
        "proto/kvferry/proto/specs.py",
        "if len(data) > MAX_MESSAGE_IDS * width:",
        "if len(data) > MAX_MESSAGE_IDS * 8:",
        ("tests/proto/test_codec.py", "tests/proto/test_specs.py"),
    ),
    SourceMutant(
        "a reference longer than its page copies bytes of the padding",
        "proto/kvferry/proto/layout.py",
        "for ref in np.flatnonzero(sizes > pages[named])",
        "for ref in np.flatnonzero(sizes > strides[named])",
        ("tests/proto/test_layout.py",),
    ),
    SourceMutant(
        "a tensor must have padding after its last page",
        "proto/kvferry/proto/layout.py",
        "(blocks - 1) * stride + page\n            for",
        "blocks * stride\n            for",
        ("tests/proto/test_layout.py",),
    ),
    SourceMutant(
        "host memory of exactly one block is refused",
        "proto/kvferry/proto/opening.py",
        "if nbytes < block:",
        "if nbytes <= block:",
        ("tests/proto/test_opening.py",),
    ),
    SourceMutant(
        "a damaged block is reported as a mistake of the caller",
        "proto/kvferry/proto/errors.py",
        "Code.DRIVER, Code.CORRUPT_BLOCK})",
        "Code.DRIVER})",
        ("tests/proto/test_errors.py",),
    ),
    SourceMutant(
        "a KV event with many hashes loses some",
        "proto/kvferry/proto/events.py",
        "hashes = event.block_hashes[start : start + MAX_BATCH_HASHES]",
        "hashes = event.block_hashes[start : start + MAX_BATCH_HASHES - 1]",
        ("tests/proto/test_events.py",),
    ),
    SourceMutant(
        "builds whose messages have other limits connect to each other",
        "proto/kvferry/proto/protocol.py",
        "description.append([field.encode_name, field.required, described])",
        "description.append([field.encode_name, field.required])",
        ("tests/proto/test_protocol.py",),
    ),
    SourceMutant(
        "an engine can shrink a page that the daemon reads",
        "proto/kvferry/shm/memfd.py",
        "if not seals & fcntl.F_SEAL_SHRINK:",
        "if not seals & _SEALS:",
        ("tests/shm/test_memfd.py",),
    ),
    SourceMutant(
        "device memory that is mapped stays allocated after it was unmapped",
        "proto/kvferry/cuda/virtual_memory.py",
        """                os.close(descriptor)
                raise
        finally:
            self._driver.call("cuMemRelease", handle)
""",
        """                os.close(descriptor)
                raise
        finally:
            pass
""",
        ("tests/cuda/test_virtual_memory.py",),
    ),
    SourceMutant(
        "memory of another GPU is mapped",
        "proto/kvferry/cuda/virtual_memory.py",
        "            self._check_device(handle)\n",
        "",
        ("tests/cuda/test_virtual_memory.py",),
    ),
)
