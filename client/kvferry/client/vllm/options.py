"""The options in kv_connector_extra_config that kvferry reads: their names, checks and values.

vLLM passes them on as they are in the JSON of --kv-transfer-config. They are checked when vLLM
starts (supported.py), with the checks that a daemon makes (kvferry.proto.opening).
What a value means for the model's chunks is checked when vLLM has planned the KV cache
(engine_config.py). Errors are Refused (BAD_CONFIG). Does not import vLLM.
"""

from __future__ import annotations

from enum import Enum

from kvferry.client.engines.options import (
    DIRECTORIES,
    PACK,
    POLICY,
    QUOTA,
    SALT,
    THRESHOLD,
    Options,
    bad_option,
    check_salt,
    namespace_options,
    read_directories,
    read_pack_mode,
    similar_keys,
    whole_number,
)
from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import MAX_COUNT

# The keys that kvferry defines.
EXPORTED_KV, STORE_MODE = "kvferry_exported_kv", "kvferry_store"
KVFERRY_KEYS = DIRECTORIES, SALT, PACK, EXPORTED_KV, STORE_MODE
# Further keys of vLLM that kvferry reads, too.
TOKENS_PER_CHUNK, BLOCKS_PER_CHUNK = "block_size", "blocks_per_chunk"
CHUNK_KEYS = TOKENS_PER_CHUNK, BLOCKS_PER_CHUNK
PROMPT_ONLY = "offload_prompt_only"
ALL_KEYS = *KVFERRY_KEYS, QUOTA, POLICY, THRESHOLD, *CHUNK_KEYS, PROMPT_ONLY
# The bound of a layout's block_size_factor.
MAX_BLOCKS_PER_CHUNK = 4096


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
        meant = similar_keys(key, ALL_KEYS)
        if meant or key.startswith("kvferry"):
            advice = f"use {' or '.join(meant or KVFERRY_KEYS)}"
            message = f"unknown key in kv_connector_extra_config; {advice}"
            raise Refused(Code.BAD_CONFIG, message, key)
    exported, prompt_only = extra.get(EXPORTED_KV), extra.get(PROMPT_ONLY, True)
    if not isinstance(exported, bool | None):
        raise bad_option(EXPORTED_KV, exported, "not true or false", "write it without quotes")
    if prompt_only not in (True, False):  # vLLM takes any text for true
        raise bad_option(PROMPT_ONLY, prompt_only, "not true or false", "write it without quotes")
    check_salt(extra.get(SALT))
    _check_chunk(extra)
    read_directories(extra, ranks)
    read_store_mode(extra)
    read_pack_mode(extra)
    namespace_options(extra, ranks)


def read_store_mode(extra: Options) -> StoreMode:
    given = extra.get(STORE_MODE)
    try:
        return StoreMode.AUTO if given is None else StoreMode(given)
    except ValueError:
        names = " or ".join(repr(mode.value) for mode in StoreMode)
        raise bad_option(STORE_MODE, given, "not known", f"use {names}") from None


def sets_chunk(extra: Options) -> bool:
    """Whether the user sets the size of a chunk."""
    return any(extra.get(key) is not None for key in CHUNK_KEYS)


def _check_chunk(extra: Options) -> None:
    for key in CHUNK_KEYS:
        most = MAX_BLOCKS_PER_CHUNK if key == BLOCKS_PER_CHUNK else MAX_COUNT - 1
        whole_number(extra, key, 1, most)
    if all(extra.get(key) is not None for key in CHUNK_KEYS):
        message = f"{TOKENS_PER_CHUNK} and {BLOCKS_PER_CHUNK} both set a chunk; remove one of them"
        raise Refused(Code.BAD_CONFIG, message, extra[BLOCKS_PER_CHUNK])
