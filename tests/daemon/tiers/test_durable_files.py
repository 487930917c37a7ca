"""Changes of files that a power cut does not undo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvferry.daemon.tiers.durable_files import write_file


def test_a_file_is_on_the_device_before_it_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it has the old contents or the new ones, whenever the power is cut."""
    path, steps = tmp_path / "meta", list[tuple[str, int]]()
    write_file(path, b"old")
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        steps.append(("synced", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def noted_rename(source: Any, target: Any) -> None:
        assert Path(source).read_bytes() == b"new"
        steps.append(("renamed", os.stat(source).st_ino))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    write_file(path, b"new")
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert steps == [("synced", file), ("renamed", file), ("synced", folder)]
    assert path.read_bytes() == b"new"
