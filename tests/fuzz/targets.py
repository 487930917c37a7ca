"""All targets, by name. What a fuzzer found for each is in a folder of its name, in `corpus`."""

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
    replies,
    siblings,
)
from fuzz.case import Target

CORPUS = Path(__file__).with_name("corpus")

TARGETS: Mapping[str, Target] = {
    "codec": Target(codec.open_codec, codec.seeds, 30_000),
    "core": Target(core_messages.open_core, core_messages.seeds, 1_500),
    "descriptors": Target(descriptors.open_socket, descriptors.seeds, 1_000),
    "block_tables": Target(block_tables.open_tables, block_tables.seeds, 800),
    "siblings": Target(siblings.open_siblings, siblings.seeds, 1_200),
    "replies": Target(replies.open_replies, replies.seeds, 4_000),
    "epochs": Target(epochs.open_page, epochs.seeds, 1_500),
    "disk_root": Target(disk_root.open_root, disk_root.seeds, 300),
}


def corpus(name: str) -> list[bytes]:
    """The inputs of a target: its seeds, and what a fuzzer found."""
    found = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    return [*TARGETS[name].seeds(), *found]
