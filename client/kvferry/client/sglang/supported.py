"""kvferry refuses versions and options of SGLang that it cannot serve, and says what to change.

Called when a server starts, in each rank, when the pools exist. Does not import SGLang.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from kvferry.client.engines.options import (
    DIRECTORIES,
    PACK,
    POLICY,
    QUOTA,
    SALT,
    THRESHOLD,
    Options,
    check_salt,
    namespace_options,
    read_directories,
    read_pack_mode,
    similar_keys,
)
from kvferry.client.sglang import SUPPORTED
from kvferry.proto.errors import Code, Refused
from kvferry.proto.version import installed_version

KEYS = DIRECTORIES, SALT, PACK, QUOTA, POLICY, THRESHOLD
# The methods that SGLang calls, and their parameters.
SIGNATURES: dict[str, tuple[str, ...]] = {
    "lookup": ("rid", "transfers"),
    "load": ("rid", "transfers"),
    "start_layer_wise_loading": (),
    "finish_layer_wise_loading": ("counter_index",),
    "cancel_queued_load": ("rid",),
    "offload": ("transfers", "session_id"),
    "num_completed_offloads": (),
    "pop_completed_offload": (),
    "reset": (),
    "close": (),
}
# Options that change where KV is, or what a slot means, and what to do instead.
EXCLUDED: dict[str, tuple[str, str]] = {
    "enable_memory_saver": ("the daemon cannot map the memory of", "--enable-memory-saver"),
    "enable_unified_memory": ("the pools share one buffer with", "--enable-unified-memory"),
    "enable_page_major_kv_layout": (
        "the layers of a page are not in buffers of their own with",
        "--enable-page-major-kv-layout",
    ),
    "enable_hisparse": ("a part of the KV is in host memory with", "--enable-hisparse"),
    "enable_kv_cache_sharding": ("pages are divided by", "--enable-kv-cache-sharding"),
    "enable_dsa_cache_layer_split": ("layers are divided by", "--enable-dsa-cache-layer-split"),
}
# Sizes that must be 1: SGLang does not compare the hits of these ranks.
SINGLE = ("pp_size", "attn_cp_size", "dcp_size")


def is_supported(version: str) -> bool:
    """Whether a version is that release, or a build of it: 0.5.23.post1, 0.5.23+cu129."""
    release = re.match(r"\d+(\.\d+)*", version)
    return release is not None and release[0] == SUPPORTED


def check_version(interface: type | None = None) -> None:
    """Raise Refused (BAD_CONFIG) if SGLang has another version, or another interface of linkers.

    interface: SGLang's UnifiedCacheLinker; None: the version alone is checked.
    """
    version = installed_version("sglang") or "an unknown version"
    found = SIGNATURES if interface is None else _signatures(interface)
    if is_supported(version) and found == SIGNATURES:
        return
    names = [name for name in {**found, **SIGNATURES} if found.get(name) != SIGNATURES.get(name)]
    moved = f" (its linkers differ in {', '.join(sorted(names))})" if names else ""
    message = (
        f"kvferry supports SGLang {SUPPORTED}, but {version} is installed{moved}; "
        f"pip install 'sglang=={SUPPORTED}'"
    )
    raise Refused(Code.BAD_CONFIG, message, version)


def _signatures(interface: type) -> dict[str, tuple[str, ...]]:
    """The methods that a linker must have, and their parameters."""
    names = getattr(interface, "__abstractmethods__", ())
    return {
        name: tuple(inspect.signature(getattr(interface, name)).parameters)[1:] for name in names
    }


def check_config(server_args: Any, params: Any, ranks: int, extra: Options) -> None:
    """Raise Refused (BAD_CONFIG) if the bytes of this server's KV could not be right.

    extra: the linker_extra_config. Its values are checked, too.
    """
    for key in extra.keys() - set(KEYS):
        meant = " or ".join(similar_keys(key, KEYS) or KEYS)
        message = f"unknown key in linker_extra_config; use {meant}"
        raise Refused(Code.BAD_CONFIG, message, key)
    check_salt(extra.get(SALT))
    read_pack_mode(extra)
    read_directories(extra, ranks)
    namespace_options(extra, ranks)
    for name, (why, option) in EXCLUDED.items():
        if getattr(server_args, name, False):
            message = f"{why} {option}; start the server without it"
            raise Refused(Code.BAD_CONFIG, message, name)
    for name in SINGLE:
        size = max(getattr(server_args, name, 1) or 1, getattr(params, name, 1) or 1)
        if size > 1:
            message = (
                f"SGLang does not agree on what these ranks can load; set {name} to 1, or start "
                "the server without --enable-unified-cache-external-linker"
            )
            raise Refused(Code.BAD_CONFIG, message, f"{name} = {size}")
