"""All targets, by name. The corpus of each is in a folder of its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fuzz import (
    block_tables,
    codec,
    core_messages,
    descriptors,
    disk_root,
    epochs,
    siblings,
)
from fuzz.case import Target

CORPUS = Path(__file__).with_name("corpus")

TARGETS: Mapping[str, Target] = {
    "codec": Target(codec.open_codec, codec.seeds, 20_000),
    "core": Target(core_messages.open_core, core_messages.seeds, 600),
    "descriptors": Target(descriptors.open_socket, descriptors.seeds, 400),
    "block_tables": Target(block_tables.open_tables, block_tables.seeds, 400),
    "siblings": Target(siblings.open_siblings, siblings.seeds, 600),
    "epochs": Target(epochs.open_page, epochs.seeds, 600),
    "disk_root": Target(disk_root.open_root, disk_root.seeds, 200),
}


def corpus(name: str) -> list[bytes]:
    """The inputs of a target: its seeds, and what a fuzzer found."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
