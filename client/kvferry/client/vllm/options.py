"""The options in kv_connector_extra_config that kvferry reads: their names, checks and values.

vLLM passes them on as they are in the JSON of --kv-transfer-config. They are checked when vLLM
starts, before it loads the weights, with the checks that a daemon makes (kvferry.proto.opening).
What a value means for the model's chunks is checked when vLLM has planned the KV cache
(engine_config.py). Errors are Refused (BAD_CONFIG). Does not import vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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

# The keys that kvferry defines.
DIRECTORIES, SALT, EXPORTED_KV = "kvferry_dirs", "kvferry_salt", "kvferry_exported_kv"
STORE_MODE = "kvferry_store"
KVFERRY_KEYS = DIRECTORIES, SALT, EXPORTED_KV, STORE_MODE
# Keys of vLLM that kvferry reads, too.
QUOTA, POLICY, THRESHOLD = "cpu_bytes_to_use", "eviction_policy", "store_threshold"
TOKENS_PER_CHUNK, BLOCKS_PER_CHUNK = "block_size", "blocks_per_chunk"
CHUNK_KEYS = TOKENS_PER_CHUNK, BLOCKS_PER_CHUNK
PROMPT_ONLY = "offload_prompt_only"
ALL_KEYS = *KVFERRY_KEYS, QUOTA, POLICY, THRESHOLD, *CHUNK_KEYS, PROMPT_ONLY
# From this similarity on, a key is taken for a misspelled one. The keys of vLLM's other connectors
# reach 0.67.
MISSPELLED = 0.85
# The bounds of a layout's block_size_factor, and of a name in a fingerprint.
MAX_BLOCKS_PER_CHUNK, MAX_NAME = 4096, 256

Options = Mapping[str, Any]


class StoreMode(Enum):
    """When a chunk is stored: once it is computed, or when the GPU is about to lose it. AUTO: at
    once while host memory has room or others wait for the chunks, else at eviction."""

    AUTO = "auto"
    AT_ONCE = "at_once"
    AT_EVICTION = "at_eviction"


def check_options(extra: Options, ranks: int = 1) -> None:
    """Raise Refused (BAD_CONFIG) for misspelled keys and invalid values.

    extra: the kv_connector_extra_config, also with keys that kvferry does not read. ranks: of the
    engine.
    """
    for key in extra.keys() - set(ALL_KEYS):
        meant = get_close_matches(key.lower().replace("-", "_"), ALL_KEYS, 1, MISSPELLED)
        if meant or key.startswith("kvferry"):
            advice = f"use {' or '.join(meant or KVFERRY_KEYS)}"
            message = f"unknown key in kv_connector_extra_config; {advice}"
            raise Refused(Code.BAD_CONFIG, message, key)
    exported, prompt_only = extra.get(EXPORTED_KV), extra.get(PROMPT_ONLY, True)
    if not isinstance(exported, bool | None):
        raise _refuse(EXPORTED_KV, exported, "not true or false", "write it without quotes")
    if prompt_only not in (True, False):  # vLLM takes any text for true
        raise _refuse(PROMPT_ONLY, prompt_only, "not true or false", "write it without quotes")
    _check_salt(extra.get(SALT))
    _check_chunk(extra)
    read_directories(extra, ranks)
    read_store_mode(extra)
    namespace_options(extra, ranks)


def namespace_options(extra: Options, ranks: int) -> NamespaceOptions:
    """Named as for vLLM's CPUOffloadingSpec; cpu_bytes_to_use is the sum of all ranks, too."""
    quota = extra.get(QUOTA)
    try:
        policy = policy_name(extra.get(POLICY, DEFAULT_POLICY))
    except Refused as error:
        raise _named(POLICY, error) from None
    return {
        "cpu_bytes_to_use": None if quota is None else _parse_quota(quota) // ranks,
        "eviction_policy": policy,
        # 0 is vLLM's default, and means the same.
        "store_threshold": max(1, _whole_number(extra, THRESHOLD, 0, MAX_COUNT - 1) or 1),
    }


def read_directories(extra: Options, ranks: int) -> tuple[str, ...]:
    """The daemons' runtime directories, one per rank; empty if the user names none."""
    given = extra.get(DIRECTORIES)
    if given is None:
        return ()
    directories = (given,) if isinstance(given, str) else given
    if not isinstance(directories, list | tuple):
        raise _refuse(DIRECTORIES, given, "not a list", "write a list of directories, one per rank")
    for directory in directories:
        if not isinstance(directory, str) or not directory.strip() or "\0" in directory:
            advice = "write the path that its daemon has as runtime_dir"
            raise _refuse(DIRECTORIES, directory, "not a directory", advice)
        try:
            with suppress(OSError):  # a directory that this user cannot read
                resolve_directory(Path(directory))
        except Refused as error:
            raise _named(DIRECTORIES, error) from None
    if 0 < len(directories) < ranks:
        advice = f"write {ranks} directories, one per rank"
        raise _refuse(DIRECTORIES, given, f"too short for {ranks} ranks", advice)
    return tuple(directories)


def read_store_mode(extra: Options) -> StoreMode:
    given = extra.get(STORE_MODE)
    try:
        return StoreMode.AUTO if given is None else StoreMode(given)
    except ValueError:
        names = " or ".join(repr(mode.value) for mode in StoreMode)
        raise _refuse(STORE_MODE, given, "not known", f"use {names}") from None


def sets_chunk(extra: Options) -> bool:
    """Whether the user sets the size of a chunk."""
    return any(extra.get(key) is not None for key in CHUNK_KEYS)


def _parse_quota(value: object) -> int:
    """A number, or a size as for the daemon's --pool-size."""
    nbytes = parse_bytes(str(value), QUOTA)
    if nbytes == 0:
        advice = "set the size of one chunk or more, or leave it out for all that is free"
        raise _refuse(QUOTA, value, "no memory", advice)
    return nbytes


def _check_salt(salt: object) -> None:
    if salt is None or type(salt) in (str, int) or (type(salt) is float and math.isfinite(salt)):
        if len(str(salt)) <= MAX_NAME:
            return
        raise _refuse(SALT, salt, f"longer than {MAX_NAME} characters", "write a shorter text")
    raise _refuse(SALT, salt, "not a text", "write it in quotes")


def _check_chunk(extra: Options) -> None:
    for key in CHUNK_KEYS:
        most = MAX_BLOCKS_PER_CHUNK if key == BLOCKS_PER_CHUNK else MAX_COUNT - 1
        _whole_number(extra, key, 1, most)
    if all(extra.get(key) is not None for key in CHUNK_KEYS):
        message = f"{TOKENS_PER_CHUNK} and {BLOCKS_PER_CHUNK} both set a chunk; remove one of them"
        raise Refused(Code.BAD_CONFIG, message, extra[BLOCKS_PER_CHUNK])


def _whole_number(extra: Options, key: str, least: int, most: int) -> int | None:
    """A number, also one in quotes, as vLLM accepts it. None if it is not set."""
    value = extra.get(key)
    if value is None:
        return None
    number = None
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):  # NaN, infinite
            number = int(value)
    if number is None or (isinstance(value, float) and number != value):
        raise _refuse(key, value, "not a whole number", f"set it to {least} or more")
    if number < least:
        raise _refuse(key, value, "too small", f"set it to {least} or more")
    if number > most:
        raise _refuse(key, value, "too large", f"set it to {most} or less")
    return number


def _named(key: str, error: Refused) -> Refused:
    """The error of a value, with the key that has it."""
    return Refused(Code.BAD_CONFIG, f"{key}: {error.message}", error.value)


def _refuse(key: str, value: object, wrong: str, advice: str) -> Refused:
    return Refused(Code.BAD_CONFIG, f"{key} = {value!r} is {wrong}; {advice}", value)
