"""One small configuration: a TOML file, overridden by the command line, read once.

Every key is a field below; its description is the help of its flag and the comment of its line in
the sample file (a test holds that comment against this).
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
from kvferry.proto.sizes import parse_bytes

MOST_JOBS = 1 << 30

# Longer than any configuration is, and quickly read.
MAX_FILE_BYTES = 1 << 20

Size: TypeAlias = str


class Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A table of the file."""


class PoolConfig(Section, frozen=True):
    size: Annotated[Size, Meta(description="host memory to keep KV blocks in")] = "4GiB"
    chunk: Annotated[
        Size, Meta(description="host memory is registered with the device in chunks of this size")
    ] = "1GiB"
    keep: Annotated[
        bool,
        Meta(
            description="have the service manager keep the pool and what is in it while the "
            "daemon is restarted; where there is none that can, the pool goes with the daemon"
        ),
    ] = True
    check_memory: Annotated[
        bool,
        Meta(description="refuse a pool larger than the memory that is available at start"),
    ] = True


class CopyConfig(Section, frozen=True):
    mode: Annotated[
        Literal["auto", "direct", "staged"],
        Meta(description="how fragments are copied; auto: as a calibration at start finds best"),
    ] = "auto"
    staging: Annotated[
        Size,
        Meta(
            description="memory of a GPU that small fragments are copied through, 64MiB at least; "
            "the more of it, the fewer turns of the GPU are taken from an engine that is busy"
        ),
    ] = "256MiB"


class IntegrityConfig(Section, frozen=True):
    # 64 GiB in 17 minutes, for less than 1 % of a core and of the memory's bandwidth.
    scrub_rate: Annotated[
        Size,
        Meta(
            description="bytes per second of stored host blocks that are read again in the "
            "background, round and round, and compared with their checksums; 0: none"
        ),
    ] = "64MiB"
    # One thread reads 9 GB/s or more: two verify 64 GiB in about 5 s.
    threads: Annotated[
        int,
        Meta(ge=1, description="threads that compute checksums of host blocks"),
    ] = 2


class LimitsConfig(Section, frozen=True):
    max_stores: Annotated[
        int, Meta(ge=1, le=MOST_JOBS, description="stores that one client may have under way")
    ] = 8192
    max_loads: Annotated[
        int,
        Meta(
            ge=1,
            le=MOST_JOBS,
            description="loads that one client may have under way, besides its stores",
        ),
    ] = 8192


class AccessConfig(Section, frozen=True):
    group: Annotated[
        str,
        Meta(
            description="group, by name or number in quotes, whose members' processes may connect "
            "and which owns the sockets; without one only root and the daemon's own user may"
        ),
    ] = ""


class EventsConfig(Section, frozen=True):
    publish: Annotated[
        str,
        Meta(
            description="ZeroMQ endpoint where KV events are published, in vLLM's form, or "
            '"off"; default: ipc, events.sock beside the other sockets'
        ),
    ] = ""


class HealthConfig(Section, frozen=True):
    every_seconds: Annotated[
        float, Meta(gt=0, description="how often a small block is copied to the device and back")
    ] = 10.0
    deadline_seconds: Annotated[
        float,
        Meta(gt=0, le=3600, description="the daemon is unhealthy when that takes longer"),
    ] = 5.0
    lane_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="the daemon is unhealthy, and tells the service manager no more that it "
            "is alive, when the device's thread does not answer for so long",
        ),
    ] = 30.0


class MetricsConfig(Section, frozen=True):
    listen: Annotated[
        str,
        Meta(
            description='"host:port" where /metrics and /health are served by HTTP, or "off"; each '
            "daemon of a machine has a port of its own, port 0 takes any and logs it"
        ),
    ] = "off"


class StopConfig(Section, frozen=True):
    drain_seconds: Annotated[
        float, Meta(ge=0, description="on SIGTERM, jobs under way have so long to end")
    ] = 5.0


class LogConfig(Section, frozen=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="what is logged, to stderr")
    ] = "info"
    format: Annotated[
        Literal["text", "json"], Meta(description="one line a record, for people or programs")
    ] = "text"


class ReferenceConfig(Section, frozen=True):
    stall: Annotated[
        float,
        Meta(
            ge=0, le=3600, description="for tests on the CPU: seconds before each piece is copied"
        ),
    ] = 0.0
    fail_every: Annotated[
        int, Meta(ge=0, description="for tests on the CPU: each n-th piece fails; 0 is none")
    ] = 0


class Config(Section, frozen=True):
    device: Annotated[
        str, Meta(description='"cpu", or a GPU by index ("0") or UUID ("GPU-...")')
    ] = "cpu"
    runtime_dir: Annotated[
        str,
        Meta(
            description="directory for the sockets, one folder a device in it; "
            "default: $RUNTIME_DIRECTORY, else $XDG_RUNTIME_DIR/kvferry, else /tmp/kvferry-UID"
        ),
    ] = ""
    pool: PoolConfig = PoolConfig()
    copy: CopyConfig = CopyConfig()
    integrity: IntegrityConfig = IntegrityConfig()
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
        """Where the folder of this device's sockets goes."""
        if self.runtime_dir:
            return Path(self.runtime_dir)
        if own := os.environ.get("RUNTIME_DIRECTORY"):
            return Path(own.split(":")[0])
        if user := os.environ.get("XDG_RUNTIME_DIR"):
            return Path(user) / "kvferry"
        return Path(f"/tmp/kvferry-{os.getuid()}")


def options(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, type, default) of every key, in order."""
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        if isinstance(field.default, Section):
            yield from options(type(field.default), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hints[field.name], field.default


def differing(one: Config, other: Config) -> Iterator[str]:
    """The dotted keys in which two configurations are not the same."""
    for key, _, _ in options():
        if attrgetter(key)(one) != attrgetter(key)(other):
            yield key


def description(hint: Any) -> str:
    """What a key is; where it takes one of some words, with these."""
    kind, *metas = get_args(hint)
    said = str(next(meta.description for meta in metas if meta.description))
    if get_origin(kind) is Literal:
        *words, last = (f'"{word}"' for word in get_args(kind))
        said += f"; {', '.join(words)} or {last}"
    return said


def read(arguments: Sequence[str] | None = None) -> Config:
    """The configuration that a command line asks for. Raises Refused (BAD_CONFIG)."""
    given = vars(_parser().parse_args(arguments))
    path = given.pop("config")
    tree: dict[str, Any] = {}
    try:
        if path is not None:
            tree = msgspec.toml.decode(_contents(path))
        for key, value in given.items():
            if value is not None:
                *sections, name = key.split(".")
                target = tree
                for section in sections:
                    target = target.setdefault(section, {})
                    if not isinstance(target, dict):
                        raise TypeError(f"{section} is a table: [{section}], and {name} in it")
                target[name] = value
        config = msgspec.convert(tree, Config, strict=False)
    except OSError as error:
        message = f"the configuration file cannot be read: {error.strerror}"
        raise Refused(Code.BAD_CONFIG, message, path or "") from error
    except RecursionError as error:
        message = "the configuration file is nested too deeply: write a table for each section"
        raise Refused(Code.BAD_CONFIG, message, path or "") from error
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        message = f"the configuration is not right: {_explained(str(error))}"
        raise Refused(Code.BAD_CONFIG, message, path or "") from error
    for key, _, _ in options():
        value = attrgetter(key)(config)
        if isinstance(value, str) and "\0" in value:
            raise Refused(Code.BAD_CONFIG, f"{key} contains a NUL character: remove it", value)
    for name, size in (("pool.size", config.pool.size), ("pool.chunk", config.pool.chunk)):
        if not parse_bytes(size):
            raise Refused(Code.BAD_CONFIG, f"{name} is at least one byte", size)
    parse_bytes(config.copy.staging)
    parse_bytes(config.integrity.scrub_rate)
    return config


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a FIFO would wait for a writer


def _contents(path: str) -> bytes:
    """What a regular file holds. Raises OSError, Refused (BAD_CONFIG); never waits for a writer."""
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            message = "the configuration is not a regular file: name a TOML file"
            raise Refused(Code.BAD_CONFIG, message, path)
        data = file.read(MAX_FILE_BYTES + 1) or b""
    if len(data) > MAX_FILE_BYTES:
        message = f"the configuration file has more than {MAX_FILE_BYTES} bytes: name a TOML file"
        raise Refused(Code.BAD_CONFIG, message, path)
    return data


def _explained(error: str) -> str:
    """With what the key is that it is about, if it is about one."""
    key = re.search(r"`\$\.([a-z_.]+)", error)
    hints = {name: hint for name, hint, _ in options()}
    return f"{error}: {description(hints[key[1]])}" if key and key[1] in hints else error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferryd",
        description="Moves KV-cache blocks between one device and host memory for LLM engines.",
        epilog="Every flag is a key of the TOML file: --pool-size is size in [pool].",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file to read; flags override it")
    for key, hint, default in options():
        flag = "--" + key.replace(".", "-").replace("_", "-")
        shown = f" (default: {default})" if default not in ("", ()) else ""
        parser.add_argument(
            flag, dest=key, metavar=key.split(".")[-1].upper(), help=description(hint) + shown
        )
    return parser
