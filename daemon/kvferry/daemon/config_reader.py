"""Reads the daemon's configuration (config.py): a TOML file, overridden by flags.

Called at start and on SIGHUP, on the main thread.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import stat
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, get_args, get_origin

import msgspec

from kvferry.daemon.config import Config, description, options
from kvferry.daemon.tier_config import CustomTierConfig, DiskTierConfig, MooncakeTierConfig
from kvferry.proto.errors import Code, Refused
from kvferry.proto.sizes import parse_bytes
from kvferry.proto.version import kvferry_version

# Upper bound of the file, larger than any use needs.
MAX_FILE_BYTES = 1 << 20
# Smallest size of a disk tier: its files have an overhead of some MiB.
MIN_DISK_BYTES = 16 << 20
# Keys that are numbers of bytes, beside tiers.disk.size, which may be empty.
SIZES = (
    "pool.size",
    "pool.chunk",
    "copy.staging",
    "integrity.scrub_rate",
    "tiers.disk.rate",
    "tiers.custom.rate",
    "tiers.mooncake.rate",
)
# The least similarity of a wrong word and the suggested one, from 0 to 1.
MIN_LIKENESS = 0.6
# The form of a device: "cpu", an index or a UUID.
DEVICE = r"cpu|[0-9]+|[A-Z]+-.+"


def read(arguments: Sequence[str] | None = None) -> Config:
    """The configuration of a command line. Raises Refused (BAD_CONFIG)."""
    parser = _parser()
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].partition("=")[0]
        flags_known = [flag_of(key) for key, _, _ in options()]
        parser.error(
            f"unknown argument {flag}{_suggestion(flag, flags_known)}; see kvferryd --help"
        )
    flags = vars(known)
    path = flags.pop("config")
    tree: dict[str, Any] = {}
    tables = {key for key, kind in _kinds().items() if get_origin(kind) is dict}
    try:
        if path is not None:
            tree = _tree(path)
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
                target[name] = _table(key, value) if key in tables else value
        for key in (*SIZES, "tiers.disk.size"):
            _write_as_text(tree, key)
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
        if isinstance(value, str):
            _check_characters(key, value)
    _check_characters("runtime_dir", str(config.directory))  # the default is of the environment
    for key in SIZES:
        size = attrgetter(key)(config)
        if not parse_bytes(size, key) and key.startswith("pool."):
            raise _wrong_value(key, size, "is zero; set at least 1 byte")
    if not re.fullmatch(DEVICE, config.device, re.IGNORECASE):
        problem = 'is not a device; set "cpu", or the index ("0") or UUID ("GPU-...") of a GPU'
        raise _wrong_value("device", config.device, problem)
    _check_disk_tier(config.tiers.disk)
    _check_custom_tier(config.tiers.custom)
    _check_mooncake_tier(config.tiers.mooncake)
    return config


def _check_characters(key: str, value: str) -> None:
    """Refuse characters that a path, a message or a worker's arguments cannot have."""
    if "\0" in value:
        raise _wrong_value(key, value, "contains a NUL character; remove it")
    try:
        value.encode()  # fails for bytes that are not UTF-8
        os.fsencode(value)  # fails for characters that the locale does not have
    except UnicodeEncodeError as error:
        problem = (
            "is not UTF-8, or not in the character set of the locale; set another value, or the "
            "environment variable PYTHONUTF8=1"
        )
        raise _wrong_value(key, value, problem) from error


def _write_as_text(tree: Any, key: str) -> None:
    """Turn a size that the file gives as a number into text, for parse_bytes."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.get(section) if isinstance(tree, dict) else None
    if isinstance(tree, dict) and type(tree.get(name)) in (int, float):
        tree[name] = str(tree[name])


def _table(key: str, text: str) -> Any:
    """A table that a flag gives as TOML."""
    try:
        return msgspec.toml.decode(f"table = {text}")["table"]
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{key} = {text!r} is not a TOML table, for example {{ n = 1 }}"
        ) from error


def _check_disk_tier(disk: DiskTierConfig) -> None:
    if disk.path and not disk.size:
        problem = (
            'is set without tiers.disk.size; set the size, for example --tiers-disk-size "200GiB"'
        )
        raise _wrong_value("tiers.disk.path", disk.path, problem)
    if disk.size and not disk.path:
        problem = (
            "is set without tiers.disk.path; name a directory, for example "
            "--tiers-disk-path /var/lib/kvferry"
        )
        raise _wrong_value("tiers.disk.size", disk.size, problem)
    if disk.key_file and not disk.path:
        problem = "is set without tiers.disk.path; name the directory of the disk tier"
        raise _wrong_value("tiers.disk.key_file", disk.key_file, problem)
    if disk.size and parse_bytes(disk.size, "tiers.disk.size") < MIN_DISK_BYTES:
        raise _wrong_value("tiers.disk.size", disk.size, "is below 16MiB; set at least 16MiB")


def _check_custom_tier(custom: CustomTierConfig) -> None:
    names = custom.module.split(".")
    if custom.module and not all(name.isidentifier() for name in names):
        problem = (
            "is not a dotted path of a module; write it as in an import, for example "
            '"my_package.my_tier"'
        )
        raise _wrong_value("tiers.custom.module", custom.module, problem)
    if custom.options and not custom.module:
        problem = "is set without tiers.custom.module; name the module of the tier"
        raise _wrong_value("tiers.custom.options", custom.options, problem)


def _check_mooncake_tier(mooncake: MooncakeTierConfig) -> None:
    host, _, port = mooncake.master.rpartition(":")
    if mooncake.master and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        problem = 'is not host:port; write it like "10.0.0.1:50051"'
        raise _wrong_value("tiers.mooncake.master", mooncake.master, problem)
    if mooncake.key_file and not mooncake.master:
        problem = "is set without tiers.mooncake.master; set the address of the master"
        raise _wrong_value("tiers.mooncake.key_file", mooncake.key_file, problem)


def _wrong_value(key: str, value: Any, problem: str) -> Refused:
    """The error for a key's value. problem: names the mistake and the remedy."""
    return Refused(Code.BAD_CONFIG, f"{key} = {value!r} {problem}", str(value))


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


def _tree(path: str) -> dict[str, Any]:
    """The tables of a file. Raises OSError and Refused (BAD_CONFIG)."""
    data = _contents(path)
    try:
        tree: dict[str, Any] = msgspec.toml.decode(data)
    except msgspec.DecodeError as error:
        place = re.search(r"at line ([0-9]+)", str(error))
        remedy = _syntax_remedy(data.decode().split("\n")[: int(place[1])]) if place else ""
        message = f"invalid configuration ({path}): {error}; {remedy or 'correct it'}"
        raise Refused(Code.BAD_CONFIG, message, path) from error
    return tree


def _syntax_remedy(lines: Sequence[str]) -> str:
    """What to change in the last of some lines, if its value has no quotes; empty if not that."""
    bare = re.fullmatch(r"""\s*([\w.-]+)\s*=\s*([^\s"'[{#][^"'#]*?)\s*(#.*)?""", lines[-1])
    if not bare:
        return ""
    headers = (re.match(r"\s*\[([\w.]+)\]", line) for line in reversed(lines))
    section = next((f"{header[1]}." for header in headers if header), "")
    if _kinds().get(section + bare[1]) is bool:
        return f"set {bare[1]} to true or false"
    return f'write text and sizes in quotes: {bare[1]} = "{bare[2]}"'


def _kinds() -> dict[str, Any]:
    """The type of each key."""
    return {key: get_args(hint)[0] for key, hint, _ in options()}


def _with_description(error: str) -> str:
    """Add the description of the key that msgspec's error is about, or a similar key."""
    if unknown := re.search(r"unknown field `(.+?)`(?: - at `\$\.([a-z_.]+)`)?", error):
        keys = [key for key, _, _ in options()]
        tables = {key.rpartition(".")[0] for key in keys}
        key_given = f"{unknown[2]}.{unknown[1]}" if unknown[2] else unknown[1]
        return error + _suggestion(key_given, [*keys, *tables])
    key = re.search(r"`\$\.([a-z_.]+)", error)
    hints = {name: hint for name, hint, _ in options()}
    if key is None or key[1] not in hints:
        return error
    words = "true or false: " if _kinds()[key[1]] is bool else ""
    return f"{error} ({words}{description(hints[key[1]])})"


def _suggestion(word: str, words: Sequence[str]) -> str:
    """A question with the most similar of `words`; empty if none is similar."""

    def likeness(other: str) -> float:
        return difflib.SequenceMatcher(None, other, word).ratio()

    best = max(words, key=likeness)  # of equal ones the first
    return f" (did you mean {best}?)" if likeness(best) >= MIN_LIKENESS else ""


def flag_of(key: str) -> str:
    """The flag of a key: --tiers-disk-path for tiers.disk.path."""
    return "--" + key.replace(".", "-").replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferryd",
        allow_abbrev=False,  # a key that is added could make an abbreviation ambiguous
        usage="kvferryd [--config FILE] [--FLAG VALUE]...",
        description="Moves KV-cache blocks between one device and host memory for LLM engines.",
        epilog="Each flag is a key of the TOML file: --tiers-disk-path is path in [tiers.disk]. "
        "Sizes: 64GiB or 64Gi is 64 x 1024^3 bytes, 64GB or 64G is 64 x 1000^3; also k, M and T; "
        "6.4e10 is a number of bytes.",
    )
    version = f"kvferryd {kvferry_version()}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    parser.add_argument("--config", metavar="FILE", help="TOML file; flags override it")
    for key, hint, default in options():
        text, metavar = description(hint), key.split(".")[-1].upper()
        if get_args(hint)[0] is bool:
            metavar, default = "true|false", str(default).lower()
        if default not in ("", ()):
            text += f" (default: {default})"
        parser.add_argument(flag_of(key), dest=key, metavar=metavar, help=text)
    return parser
