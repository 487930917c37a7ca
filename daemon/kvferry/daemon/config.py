"""The daemon's configuration: a TOML file, overridden by flags.

Every key is a field below. Its description is the help of its flag and the comment above its line
in the sample file; a test compares the two. Read at start and on SIGHUP, on the main thread.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvferry.proto.errors import Code, Refused
from kvferry.proto.runtime_directory import default_directory
from kvferry.proto.sizes import parse_bytes

# Upper bounds of values and of the file, larger than any use needs.
MAX_JOBS = 1 << 30
MAX_FILE_BYTES = 1 << 20
MAX_ADMIT_AFTER = 255
# Smallest size of a disk tier: its files have an overhead of some MiB.
MIN_DISK_BYTES = 16 << 20
# Flags that are shorter than their keys.
SHORT_FLAGS = {"tiers.disk.path": "--tier-disk"}

Size: TypeAlias = str


class Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A table of the file."""


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


class DiskTierConfig(Section, frozen=True):
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
    write: Annotated[
        Literal["clean_ahead", "write_through", "off"],
        Meta(
            description="which blocks the daemon writes to disk in the background; clean_ahead: "
            "the coldest quarter of each namespace, before they are evicted; write_through: all "
            "blocks; off: none, but the daemon still finds the blocks that the disk has"
        ),
    ] = "clean_ahead"
    admit_after: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_ADMIT_AFTER,
            description="a block is written from this use on; storing it is the first",
        ),
    ] = 1
    rate: Annotated[
        Size, Meta(description="bytes per second that are written at most; 0: no limit")
    ] = "0"


class TiersConfig(Section, frozen=True):
    disk: DiskTierConfig = DiskTierConfig()


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
            "use another port per daemon; port 0 takes a free one and logs it"
        ),
    ] = "off"


class StopConfig(Section, frozen=True):
    drain_seconds: Annotated[
        float, Meta(ge=0, description="after SIGTERM, jobs in flight have this long to complete")
    ] = 5.0


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
        str, Meta(description='"cpu", or a GPU by index ("0") or UUID ("GPU-...")')
    ] = "cpu"
    runtime_dir: Annotated[
        str,
        Meta(
            description="parent of the directories with the sockets, one per device; "
            "default: $RUNTIME_DIRECTORY, else $XDG_RUNTIME_DIR/kvferry, else /tmp/kvferry-UID"
        ),
    ] = ""
    pool: PoolConfig = PoolConfig()
    copy: CopyConfig = CopyConfig()
    integrity: IntegrityConfig = IntegrityConfig()
    tiers: TiersConfig = TiersConfig()
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


def options(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, type, default) of every key, in order."""
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        if isinstance(field.default, Section):
            yield from options(type(field.default), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hints[field.name], field.default


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


def read(arguments: Sequence[str] | None = None) -> Config:
    """The configuration of a command line. Raises Refused (BAD_CONFIG)."""
    flags = vars(_parser().parse_args(arguments))
    path = flags.pop("config")
    tree: dict[str, Any] = {}
    try:
        if path is not None:
            tree = msgspec.toml.decode(_contents(path))
        for key, value in flags.items():
            if value is not None:
                *sections, name = key.split(".")
                target = tree
                for section in sections:
                    target = target.setdefault(section, {})
                    if not isinstance(target, dict):
                        raise TypeError(
                            f"{section} = {target!r} is not a table [{section}] with {name}"
                        )
                target[name] = value
        config = msgspec.convert(tree, Config, strict=False)
    except OSError as error:
        message = f"cannot read {path} ({error.strerror}); name a readable TOML file"
        raise Refused(Code.BAD_CONFIG, message, path or "") from error
    except RecursionError as error:
        message = f"{path} is nested too deeply; write one table per section"
        raise Refused(Code.BAD_CONFIG, message, path or "") from error
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        source = path or "command line"
        message = f"invalid configuration ({source}): {_with_description(str(error))}; correct it"
        raise Refused(Code.BAD_CONFIG, message, source) from error
    for key, _, _ in options():
        value = attrgetter(key)(config)
        if isinstance(value, str) and "\0" in value:
            message = f"{key} = {value!r} contains a NUL character; remove it"
            raise Refused(Code.BAD_CONFIG, message, value)
    for key in ("pool.size", "pool.chunk", "copy.staging", "integrity.scrub_rate"):
        size = attrgetter(key)(config)
        if not parse_bytes(size, key) and key.startswith("pool."):
            raise Refused(Code.BAD_CONFIG, f"{key} = {size!r} is zero; set at least 1 byte", size)
    _check_disk_tier(config.tiers.disk)
    return config


def _check_disk_tier(disk: DiskTierConfig) -> None:
    parse_bytes(disk.rate, "tiers.disk.rate")
    if disk.path and not disk.size:
        message = (
            f"tiers.disk.path = {disk.path!r} is set without tiers.disk.size; set the size, for "
            'example --tier-disk-size "200GiB"'
        )
        raise Refused(Code.BAD_CONFIG, message, disk.path)
    if disk.size and not disk.path:
        message = (
            f"tiers.disk.size = {disk.size!r} is set without tiers.disk.path; name a directory, "
            "for example --tier-disk /var/lib/kvferry"
        )
        raise Refused(Code.BAD_CONFIG, message, disk.size)
    if disk.size and parse_bytes(disk.size, "tiers.disk.size") < MIN_DISK_BYTES:
        message = f"tiers.disk.size = {disk.size!r} is below 16MiB; set at least 16MiB"
        raise Refused(Code.BAD_CONFIG, message, disk.size)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a FIFO would wait for a writer


def _contents(path: str) -> bytes:
    """The contents of a regular file. Raises OSError and Refused (BAD_CONFIG); never blocks."""
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            message = f"{path} is not a regular file; name a TOML file"
            raise Refused(Code.BAD_CONFIG, message, path)
        data = file.read(MAX_FILE_BYTES + 1) or b""
    if len(data) > MAX_FILE_BYTES:
        message = f"{path} has more than {MAX_FILE_BYTES} bytes; name a TOML file"
        raise Refused(Code.BAD_CONFIG, message, path)
    return data


def _with_description(error: str) -> str:
    """Add the description of the key that msgspec's error is about."""
    key = re.search(r"`\$\.([a-z_.]+)", error)
    hints = {name: hint for name, hint, _ in options()}
    return f"{error} ({description(hints[key[1]])})" if key and key[1] in hints else error


def flag_of(key: str) -> str:
    """The flag of a key: --pool-size for pool.size, --tier-disk-size for tiers.disk.size."""
    flag = key.replace("tiers.", "tier.").replace(".", "-").replace("_", "-")
    return SHORT_FLAGS.get(key, f"--{flag}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferryd",
        description="Moves KV-cache blocks between one device and host memory for LLM engines.",
        epilog="Each flag is a key of the TOML file: --pool-size is size in [pool].",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file; flags override it")
    for key, hint, default in options():
        text = description(hint)
        if default not in ("", ()):
            text += f" (default: {default})"
        parser.add_argument(flag_of(key), dest=key, metavar=key.split(".")[-1].upper(), help=text)
    return parser
