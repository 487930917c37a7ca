"""The sections of tiers in the daemon's configuration (config.py).

The section of a tier is all that the daemon knows about the tier; tiers/ gets it as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvferry.proto.sizes import parse_bytes

# Upper bound, larger than any use needs.
MAX_ADMIT_AFTER = 255

Size: TypeAlias = str


class Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A table of the file."""


WritePolicy: TypeAlias = Annotated[
    Literal["clean_ahead", "write_through", "off"],
    Meta(
        description="which blocks the daemon writes into the tier in the background; clean_ahead: "
        "those that are evicted next (the coldest quarter of each namespace), and all that were "
        "stored before them; write_through: all blocks, also those that were read from a slower "
        "tier; both write a prompt from its head on; a block that is evicted before its turn is "
        "not written; off: none, but the daemon still finds the blocks that the tier has"
    ),
]
AdmitAfter: TypeAlias = Annotated[
    int,
    Meta(
        ge=1,
        le=MAX_ADMIT_AFTER,
        description="a block is written from this use on; storing it is the first",
    ),
]
Rate: TypeAlias = Annotated[
    Size, Meta(description="bytes per second that are written at most; 0: no limit")
]


KeyFile: TypeAlias = Annotated[
    str,
    Meta(
        description="file of 32 random bytes with which the tier's blocks are encrypted, for the "
        "daemon's user alone (mode 0400), or the name of a systemd credential, without a slash; "
        "blocks of another key are not found; default: blocks are not encrypted"
    ),
]


class DiskTierConfig(Section, frozen=True):
    name: ClassVar[str] = "disk"
    is_shared: ClassVar[bool] = False
    module: ClassVar[str] = "kvferry.daemon.tiers.disk"
    locality: ClassVar[str | None] = "LOCAL"

    path: Annotated[
        str,
        Meta(
            description="directory of the disk tier, for this daemon alone; blocks that the pool "
            "has no room for are found there, also after a reboot; default: no disk tier"
        ),
    ] = ""
    size: Annotated[
        Size, Meta(description="disk space that the tier may use; required if path is set")
    ] = ""
    key_file: KeyFile = ""
    write: WritePolicy = "clean_ahead"
    admit_after: AdmitAfter = 1
    rate: Rate = "0"

    @property
    def is_used(self) -> bool:
        return bool(self.path)

    @property
    def options(self) -> dict[str, Any]:
        path, size = str(Path(self.path).absolute()), parse_bytes(self.size)
        return {"path": path, "size": size, "key_file": self.key_file}


class CustomTierConfig(Section, frozen=True):
    name: ClassVar[str] = "custom"
    key_file: ClassVar[str] = ""
    locality: ClassVar[str | None] = None

    module: Annotated[
        str,
        Meta(
            description="dotted path of a Python module with open_tier(options, memory), which "
            "returns your own tier; default: none"
        ),
    ] = ""
    options: Annotated[
        dict[str, Any], Meta(description="table that is passed to open_tier; in a flag as TOML")
    ] = msgspec.field(default_factory=dict)
    shared: Annotated[
        bool,
        Meta(
            description="whether other hosts use the storage of the tier, too; it is then a "
            "SharedTier"
        ),
    ] = False
    write: WritePolicy = "clean_ahead"
    admit_after: AdmitAfter = 1
    rate: Rate = "0"

    @property
    def is_used(self) -> bool:
        return bool(self.module)

    @property
    def is_shared(self) -> bool:
        return self.shared


class MooncakeTierConfig(Section, frozen=True):
    name: ClassVar[str] = "mooncake"
    is_shared: ClassVar[bool] = True
    module: ClassVar[str] = "kvferry.daemon.tiers.mooncake"
    locality: ClassVar[str | None] = "REMOTE"

    master: Annotated[
        str,
        Meta(
            description='"host:port" of the master of a Mooncake Store, in which the daemons of '
            "several hosts find each other's blocks; default: none"
        ),
    ] = ""
    protocol: Annotated[
        Literal["tcp", "rdma"], Meta(description="how blocks are moved over the network")
    ] = "tcp"
    device: Annotated[
        str, Meta(description="RDMA devices, separated by commas; default: chosen by the store")
    ] = ""
    host: Annotated[
        str,
        Meta(
            description="address under which other hosts reach this one; default: the address "
            "from which the master is reached"
        ),
    ] = ""
    key_file: KeyFile = ""
    write: WritePolicy = "clean_ahead"
    admit_after: AdmitAfter = 2
    rate: Rate = "0"

    @property
    def is_used(self) -> bool:
        return bool(self.master)

    @property
    def options(self) -> dict[str, Any]:
        names = "master", "protocol", "device", "host", "key_file"
        return {name: getattr(self, name) for name in names}


# name: in logs, metrics and KV events. is_shared: whether it is a SharedTier. module, options: its
# function `open_tier(options, memory)` runs in the tier's process. locality: whether other hosts
# can load its blocks; None: not known.
TierConfig: TypeAlias = DiskTierConfig | CustomTierConfig | MooncakeTierConfig
