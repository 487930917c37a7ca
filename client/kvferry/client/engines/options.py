"""Options that all engines pass to kvferry: their names, checks and values.

They are what a user writes as JSON in an option of the engine, and are checked when the engine
starts, with the checks that a daemon makes (kvferry.proto.opening). Errors are Refused
(BAD_CONFIG).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

from kvferry.client.endpoint import resolve_directory
from kvferry.client.session_state import NamespaceOptions
from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import DEFAULT_POLICY
from kvferry.proto.opening import policy_name
from kvferry.proto.sizes import parse_bytes
from kvferry.proto.specs import MAX_COUNT

# The keys that kvferry defines, and those with the names of vLLM's.
DIRECTORIES, SALT, PACK = "kvferry_dirs", "kvferry_salt", "kvferry_pack"
QUOTA, POLICY, THRESHOLD = "cpu_bytes_to_use", "eviction_policy", "store_threshold"
# From this similarity on, a key is taken for a misspelled one. The keys of vLLM's other connectors
# reach 0.67.
MISSPELLED = 0.85
# The length of a name in a fingerprint.
MAX_NAME = 256

Options = Mapping[str, Any]


class PackMode(Enum):
    """Whether bfloat16 KV is packed in host memory. AUTO: on GPUs, if all KV is bfloat16."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def similar_keys(key: str, known: Sequence[str]) -> list[str]:
    """The known key that a user may have meant, if any."""
    return get_close_matches(key.lower().replace("-", "_"), known, 1, MISSPELLED)


def user_salt(extra: Options) -> str:
    """The user's salt; "" if there is none, as for an unset value that a template renders.

    With one, no other part of the fingerprint protects what cannot be identified.
    """
    salt = extra.get(SALT)
    return "" if salt is None else str(salt).strip()


def read_pack_mode(extra: Options) -> PackMode:
    given = extra.get(PACK)
    try:
        return PackMode.AUTO if given is None else PackMode(given)
    except ValueError:
        names = " or ".join(repr(mode.value) for mode in PackMode)
        raise bad_option(PACK, given, "not known", f"use {names}") from None


def namespace_options(extra: Options, ranks: int) -> NamespaceOptions:
    """Named as for vLLM's CPUOffloadingSpec; cpu_bytes_to_use is the sum of all ranks, too."""
    quota = extra.get(QUOTA)
    try:
        policy = policy_name(extra.get(POLICY, DEFAULT_POLICY))
    except Refused as error:
        raise named(POLICY, error) from None
    return {
        "cpu_bytes_to_use": None if quota is None else _parse_quota(quota) // ranks,
        "eviction_policy": policy,
        # 0 is vLLM's default, and means the same.
        "store_threshold": max(1, whole_number(extra, THRESHOLD, 0, MAX_COUNT - 1) or 1),
    }


def read_directories(extra: Options, ranks: int) -> tuple[str, ...]:
    """The daemons' runtime directories, one per rank; empty if the user names none."""
    given = extra.get(DIRECTORIES)
    if given is None:
        return ()
    directories = (given,) if isinstance(given, str) else given
    if not isinstance(directories, list | tuple):
        raise bad_option(
            DIRECTORIES, given, "not a list", "write a list of directories, one per rank"
        )
    for directory in directories:
        if not isinstance(directory, str) or not directory.strip() or "\0" in directory:
            advice = "write the path that its daemon has as runtime_dir"
            raise bad_option(DIRECTORIES, directory, "not a directory", advice)
        try:
            with suppress(OSError):  # a directory that this user cannot read
                resolve_directory(Path(directory))
        except Refused as error:
            raise named(DIRECTORIES, error) from None
    if 0 < len(directories) < ranks:
        advice = f"write {ranks} directories, one per rank"
        raise bad_option(DIRECTORIES, given, f"too short for {ranks} ranks", advice)
    return tuple(directories)


def _parse_quota(value: object) -> int:
    """A number, or a size as for the daemon's --pool-size."""
    nbytes = parse_bytes(str(value), QUOTA)
    if nbytes == 0:
        advice = "set the size of one chunk or more, or leave it out for all that is free"
        raise bad_option(QUOTA, value, "no memory", advice)
    return nbytes


def check_salt(salt: object) -> None:
    """Raise Refused if it is no short text."""
    if salt is None or type(salt) in (str, int) or (type(salt) is float and math.isfinite(salt)):
        if len(str(salt)) <= MAX_NAME:
            return
        raise bad_option(SALT, salt, f"longer than {MAX_NAME} characters", "write a shorter text")
    raise bad_option(SALT, salt, "not a text", "write it in quotes")


def whole_number(extra: Options, key: str, least: int, most: int) -> int | None:
    """A number, also one in quotes, as vLLM accepts it. None if it is not set."""
    value = extra.get(key)
    if value is None:
        return None
    number = None
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):  # NaN, infinite
            number = int(value)
    if number is None or (isinstance(value, float) and number != value):
        raise bad_option(key, value, "not a whole number", f"set it to {least} or more")
    if number < least:
        raise bad_option(key, value, "too small", f"set it to {least} or more")
    if number > most:
        raise bad_option(key, value, "too large", f"set it to {most} or less")
    return number


def named(key: str, error: Refused) -> Refused:
    """The error of a value, with the key that has it."""
    return Refused(Code.BAD_CONFIG, f"{key}: {error.message}", error.value)


def bad_option(key: str, value: object, wrong: str, advice: str) -> Refused:
    """The error of a value. advice: what to write instead."""
    return Refused(Code.BAD_CONFIG, f"{key} = {value!r} is {wrong}; {advice}", value)
