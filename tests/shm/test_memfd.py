"""Sealed memfds."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.proto.errors import Code, Refused
from kvferry.shm.memfd import check_sealed, read_seals, sealed_memfd


def test_a_sealed_memfd_is_zero_and_keeps_its_size() -> None:
    descriptor = sealed_memfd("test", 4096)
    try:
        assert os.pread(descriptor, 8192, 0) == bytes(4096)
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        check_sealed(descriptor, "a test")
    finally:
        os.close(descriptor)


def unsealed(_: Path) -> int:
    return os.memfd_create("test", os.MFD_ALLOW_SEALING)


def sealed_against_growth(folder: Path) -> int:
    descriptor = unsealed(folder)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return descriptor


def file_without_seals(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY)


@pytest.mark.parametrize(
    ("create", "seals", "message"),
    [
        (unsealed, 0, r"the page can be shrunk .*; seal it with F_SEAL_SHRINK"),
        (sealed_against_growth, fcntl.F_SEAL_GROW, r"the page can be shrunk .*seals 0x4"),
        (file_without_seals, None, r"the page is not a memfd; create it with memfd_create"),
    ],
)
def test_memory_that_can_shrink_is_refused(
    tmp_path: Path, create: Callable[[Path], int], seals: int | None, message: str
) -> None:
    descriptor = create(tmp_path)
    try:
        assert read_seals(descriptor) == seals
        with pytest.raises(Refused, match=message) as refused:
            check_sealed(descriptor, "the page")
        assert refused.value.code == Code.NOT_SHAREABLE
    finally:
        os.close(descriptor)
