"""The keys of the daemon's configuration, and their defaults. config_reader.py reads it.

Every key is a field below. Its description is the help of its flag and the comment above its line
in the sample file; a test compares the two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from kvferry.daemon.tier_config import (
    CustomTierConfig,
    DiskTierConfig,
    MooncakeTierConfig,
    Section,
    Size,
    TierConfig,
)
from kvferry.proto.runtime_directory import default_directory

# Upper bound of jobs, larger than any use needs.
MAX_JOBS = 1 << 30


class PoolConfig(Section, frozen=True):
    size: Annotated[Size, Meta(description="host memory for KV blocks")] = "4GiB"
    chunk: Annotated[
        Size, Meta(description="size of the chunks in which the pool is registered with the device")
    ] = "1GiB"
    keep: Annotated[
        bool,
        Meta(
            description="keep the pool and its blocks over a restart of the daemon, in the "
            "descriptor store of systemd; without one the pool is lost with the daemon"
        ),
    ] = True
    check_memory: Annotated[
        bool,
        Meta(description="refuse to start if the pool is larger than the available memory"),
    ] = True


class CopyConfig(Section, frozen=True):
    mode: Annotated[
        Literal["auto", "direct", "staged"],
        Meta(description="how fragments are copied; auto: chosen by a calibration at start"),
    ] = "auto"
    staging: Annotated[
        Size,
        Meta(
            description="GPU memory through which small fragments are copied, at least 64MiB; "
            "a larger buffer interrupts a busy engine less often"
        ),
    ] = "256MiB"


class IntegrityConfig(Section, frozen=True):
    # Reads 64 GiB in 17 minutes, with less than 1 % of a core and of the memory bandwidth.
    scrub_rate: Annotated[
        Size,
        Meta(
            description="bytes per second of stored host blocks that the background scrub reads "
            "and compares with their checksums; 0: no scrub"
        ),
    ] = "64MiB"
    # One thread reads 9 GB/s or more, so two verify 64 GiB in about 5 s.
    threads: Annotated[
        int,
        Meta(ge=1, description="threads that compute checksums of host blocks"),
    ] = 2


class TiersConfig(Section, frozen=True):
    """Fastest first."""

    disk: DiskTierConfig = DiskTierConfig()
    custom: CustomTierConfig = CustomTierConfig()
    mooncake: MooncakeTierConfig = MooncakeTierConfig()

    @property
    def used(self) -> tuple[TierConfig, ...]:
        return tuple(tier for tier in (self.disk, self.custom, self.mooncake) if tier.is_used)


class SiblingsConfig(Section, frozen=True):
    enabled: Annotated[
        bool,
        Meta(
            description="exchange blocks with the other daemons of this host and user that have "
            "this setting: the engines of each find the blocks that any of them has stored"
        ),
    ] = True
    store_all: Annotated[
        bool,
        Meta(
            description="store also what a sibling has; otherwise it is left out, so that the "
            "pools add up"
        ),
    ] = False
    directories: Annotated[
        str,
        Meta(
            description="further runtime directories in which daemons are searched, separated by "
            "colons, such as those of containers, or of several daemons with device cpu; default: "
            "only runtime_dir"
        ),
    ] = ""


class LimitsConfig(Section, frozen=True):
    max_stores: Annotated[
        int, Meta(ge=1, le=MAX_JOBS, description="stores that one client may have in flight")
    ] = 8192
    max_loads: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_JOBS,
            description="loads that one client may have in flight, besides its stores",
        ),
    ] = 8192


class AccessConfig(Section, frozen=True):
    group: Annotated[
        str,
        Meta(
            description="group whose members may connect, by name or by number in quotes; the "
            "sockets belong to it; default: only root and the daemon's user may connect"
        ),
    ] = ""


class EventsConfig(Section, frozen=True):
    publish: Annotated[
        str,
        Meta(
            description="ZeroMQ endpoint at which KV events are published in vLLM's format, or "
            '"off"; default: events.sock in the directory of the other sockets'
        ),
    ] = ""


class HealthConfig(Section, frozen=True):
    every_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds between two probes, which copy a block to the device and back",
        ),
    ] = 10.0
    deadline_seconds: Annotated[
        float,
        Meta(gt=0, le=3600, description="the daemon is unhealthy if the probe takes longer"),
    ] = 5.0
    worker_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="if the device worker does not respond for so long, the daemon is "
            "unhealthy and stops sending keep-alives to the service manager",
        ),
    ] = 30.0


class MetricsConfig(Section, frozen=True):
    listen: Annotated[
        str,
        Meta(
            description='"host:port" at which /metrics and /health are served over HTTP, or "off"; '
            '":port" is all addresses, of IPv4 and IPv6; use another port per daemon; port 0 takes '
            "a free one and logs it"
        ),
    ] = "off"


class StopConfig(Section, frozen=True):
    drain_seconds: Annotated[
        float, Meta(ge=0, description="after SIGTERM, jobs in flight have this long to complete")
    ] = 5.0
    with_process: Annotated[
        int,
        Meta(
            ge=0, description="stop when the process with this id ends, as after SIGTERM; 0: none"
        ),
    ] = 0


class LogConfig(Section, frozen=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="least severe level that is logged, to stderr"),
    ] = "info"
    format: Annotated[
        Literal["text", "json"], Meta(description="log format, one line per event")
    ] = "text"


class ReferenceConfig(Section, frozen=True):
    stall: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="for tests on the CPU: delay in seconds before each chunk is copied",
        ),
    ] = 0.0
    fail_every: Annotated[
        int, Meta(ge=0, description="for tests on the CPU: every n-th chunk fails; 0: none")
    ] = 0


class Config(Section, frozen=True):
    device: Annotated[
        str, Meta(description='"cpu", or a GPU by index ("0") or UUID ("GPU-...", "MIG-...")')
    ] = "cpu"
    runtime_dir: Annotated[
        str,
        Meta(
            description="parent of the directories with the sockets, one per device; "
            "default: $RUNTIME_DIRECTORY, else $XDG_RUNTIME_DIR/kvferry, else /tmp/kvferry-UID"
        ),
    ] = ""
    state_dir: Annotated[
        str,
        Meta(
            description="directory of the file that has the resets of all namespaces; the same one "
            "for all daemons of this host and user, on a disk if there is a disk tier; "
            "default: $STATE_DIRECTORY, else runtime_dir"
        ),
    ] = ""
    pool: PoolConfig = PoolConfig()
    copy: CopyConfig = CopyConfig()
    integrity: IntegrityConfig = IntegrityConfig()
    tiers: TiersConfig = TiersConfig()
    siblings: SiblingsConfig = SiblingsConfig()
    access: AccessConfig = AccessConfig()
    limits: LimitsConfig = LimitsConfig()
    events: EventsConfig = EventsConfig()
    health: HealthConfig = HealthConfig()
    metrics: MetricsConfig = MetricsConfig()
    stop: StopConfig = StopConfig()
    log: LogConfig = LogConfig()
    reference: ReferenceConfig = ReferenceConfig()

    @property
    def directory(self) -> Path:
        """The runtime directory, which contains one directory per device."""
        if self.runtime_dir:
            return Path(self.runtime_dir)
        return default_directory()

    @property
    def state_directory(self) -> Path:
        if self.state_dir:
            return Path(self.state_dir)
        if systemd := os.environ.get("STATE_DIRECTORY"):
            return Path(systemd.split(":")[0])
        return self.directory


def options(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, type, default) of every key, in order."""
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        default = field.default
        if isinstance(default, Section):
            yield from options(type(default), f"{prefix}{field.name}.")
            continue
        if default is msgspec.NODEFAULT:  # a table
            default = {}
        yield f"{prefix}{field.name}", hints[field.name], default


def changed_keys(one: Config, other: Config) -> Iterator[str]:
    """The dotted keys whose values differ between two configurations."""
    for key, _, _ in options():
        if attrgetter(key)(one) != attrgetter(key)(other):
            yield key


def description(hint: Any) -> str:
    """The description of a key, and its allowed words if it has some."""
    kind, *metas = get_args(hint)
    text = str(next(meta.description for meta in metas if meta.description))
    if get_origin(kind) is Literal:
        *words, last = (f'"{word}"' for word in get_args(kind))
        text += f"; {', '.join(words)} or {last}"
    return text
