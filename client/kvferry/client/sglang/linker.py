"""KVFerryLinker: SGLang's UnifiedCacheLinker over the daemon of a rank's GPU.

SGLang's tree asks it what a request could load (`lookup`), has it load that to slots of the request
(`load`, `start_layer_wise_loading`), and offers it each new node (`offload`). One per rank, used in
the scheduler's thread. Apart from the constructor, no method raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvferry.client.endpoint import find_daemon, locate_daemon
from kvferry.client.engines.connection_log import ConnectionLog
from kvferry.client.engines.options import (
    namespace_options,
    read_directories,
    read_pack_mode,
)
from kvferry.client.engines.rank_session import RankIdentity, RankSession
from kvferry.client.manager import OffloadingManager
from kvferry.client.sglang.block_ids import BlockIds, SourcePages
from kvferry.client.sglang.fingerprint import Rank, read_fingerprint
from kvferry.client.sglang.loads import LoadedLayers, Loads
from kvferry.client.sglang.pools import pool_names, read_pools
from kvferry.client.sglang.promises import PageKeys, Promises
from kvferry.client.sglang.stores import Stores
from kvferry.client.sglang.supported import check_config, check_version
from kvferry.client.sglang.transfers import RankTransfers
from kvferry.client.writers import writer_of
from kvferry.proto.errors import Gone, KVFerryError
from kvferry.proto.keys import OffloadKey

log = logging.getLogger("kvferry")

# Tokens of a page from which on the work per page is small beside its copy.
FEW_TOKENS = 16


class KVFerryLinker(UnifiedCacheLinker):
    """Constructed by SGLang, from its command line. Raises Refused (BAD_CONFIG) if the server
    cannot be served; without a daemon it starts, and finds nothing until one runs."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        check_version(UnifiedCacheLinker)
        self._group = params.attn_tp_cache_group or params.tp_cache_group
        number, self._ranks = _rank(self._group)
        # server_args has the values that the user gave; SGLang's decisions are beside them.
        options = resolved_view(server_args)
        check_config(options, params, self._ranks, extra_config)
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        mode = read_pack_mode(extra_config)
        self._offloaded = read_pools(kvcache, params, params.page_size, mode)
        self.pools = pool_names(self._offloaded)
        self.forward_stream = forward_stream
        replicated = self._offloaded.replicated and self._ranks > 1
        start = _common(uuid4().hex, self._group)
        layout = self._offloaded.kv_caches.layout
        identity = Rank(0 if replicated else number, self._ranks, start)
        fingerprint = read_fingerprint(options, layout, identity, params.page_size, extra_config)
        if params.page_size < FEW_TOKENS:
            log.warning(
                "kvferry: pages of %d tokens cost time for each token; start the server with "
                "--page-size 64",
                params.page_size,
            )
        directories = read_directories(extra_config, self._ranks)
        self._session = RankSession(
            RankIdentity(
                f"rank {number}",
                f"sglang-{uuid4().hex[:12]}",
                f"SGLang rank {number}",
                fingerprint,
                namespace_options(extra_config, self._ranks),
                lambda uuid: _find_daemon(directories, number, self._ranks, uuid),
                mirror=True,
            ),
            self._offloaded.kv_caches,
        )
        self._rank, self._replicated = number, replicated
        groups = len(layout.groups)
        self._groups = groups
        self._transfers = RankTransfers(self._session, forward_stream)
        layers, sections = self._offloaded.layers, layout.sections
        loaded = LoadedLayers(groups, layout.host_block_bytes, layers, sections)
        self.layer_done_counter = self._loads = Loads(self._session, self._transfers, loaded)
        # None if no daemon can serve the device.
        self._manager: OffloadingManager | None = None
        self._has_loaded = False
        if (client := self._session.client) is not None:
            self._manager = OffloadingManager(client)
            self._promises = Promises(client, self._manager)
            self._connection_log = ConnectionLog(log, self._block_tokens)
            self._stores = Stores(self._session, self._manager, self._transfers, self._own_keys)
        if "mamba" in {source.name for source in self._offloaded.sources}:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)

    # Lookups and loads

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """The lengths, in pages, of all prefixes that can be restored whole."""
        if self._manager is None:
            return []
        by_name = {transfer.name.value: transfer for transfer in transfers}
        hashes = by_name["kv"].keys
        windows = [
            (self._offloaded.source(name).keys(hashes), len(transfer.keys))
            for name, transfer in by_name.items()
            if name != "kv"
        ]
        try:
            return self._promises.lookup(rid, self._page_keys("kv", hashes), windows)
        except KVFerryError as error:
            log.warning("kvferry: a lookup is a miss: %s", error)
            return []

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load of what `lookup` has promised. False: SGLang computes it.

        All ranks must return the same, so if there are several, a load whose promise does not hold
        on this one is tried, and fails.
        """
        if self._manager is None or not (self._promises.claim(rid) or self._ranks > 1):
            return False
        self._loads.queue(rid, self._pages(transfers))
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        if not self._loads.cancel(rid):
            return False
        self._promises.done(rid)
        return True

    def start_layer_wise_loading(self) -> int:
        return self._loads.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed, rids = self._loads.finish(counter_index)
        for rid in rids:
            self._promises.done(rid)
        if landed and rids and not self._has_loaded:
            self._has_loaded = True
            log.info("kvferry: first load from host memory")
        return landed

    # Stores

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue a store of a node. False while no daemon is connected: SGLang offers it again."""
        if self._manager is None or self._manager.gone is not None:
            return False
        self._stores.offer(BlockIds(self._pages(transfers), self._groups))
        return True

    def num_completed_offloads(self) -> int:
        """Called in each step, also while the server is idle: it advances everything."""
        if self._manager is None:
            return 0
        self._transfers.poll()
        try:
            self._connection_log.update(self._manager)
            self._stores.advance()
            self._promises.expire(time.monotonic())
            self._manager.flush()
        except KVFerryError as error:
            log.warning("kvferry: %s", error)
        return self._stores.ended

    def pop_completed_offload(self) -> bool:
        return self._stores.take()

    # The server's life

    def reset(self) -> None:
        """SGLang's cache is flushed, perhaps because the weights have changed: the namespace is
        emptied, for all its servers."""
        self._end_all()
        if self._manager is not None:
            self._manager.reset_cache()

    def close(self) -> None:
        self._end_all()
        self._session.shutdown()

    def _end_all(self) -> None:
        """Return when no transfer reads or writes the device."""
        self._loads.end_all()
        if self._manager is not None:
            self._stores.end_all()
            self._promises.end_all()

    @property
    def _block_tokens(self) -> tuple[int, ...]:
        """For each KV cache group that has each page: the tokens of its blocks."""
        (kv, *_) = self._offloaded.sources
        return (kv.slots,) * len(kv.groups)

    def _page_keys(self, name: str, hashes: Sequence[str]) -> list[PageKeys]:
        return self._offloaded.source(name).keys(hashes)

    def _pages(self, transfers: list[Any]) -> list[SourcePages]:
        """The pages of transfers, in the order of their sources' groups."""
        by_name = {transfer.name.value: transfer for transfer in transfers}
        return [
            SourcePages(source, source.keys(transfer.keys), transfer.device_indices)
            for source in self._offloaded.sources
            if (transfer := by_name.get(source.name)) is not None and transfer.keys
        ]

    def _own_keys(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """The keys that this rank stores: if all ranks hold the same bytes, and their daemons read
        each other's pools, each key has one writer."""
        client = self._session.client
        if not self._replicated or client is None or not client.namespace.opened.stores_once:
            return keys
        return [key for key in keys if writer_of(key, self._ranks) == self._rank]


def _rank(group: Any) -> tuple[int, int]:
    """The number of this rank, and of all, among those that hold one request's KV."""
    if group is None or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _common(text: str, group: Any) -> str:
    """The text of the first rank."""
    if _rank(group)[1] == 1:
        return text
    texts: list[Any] = [None] * _rank(group)[1]
    torch.distributed.all_gather_object(texts, text, group=group)
    return str(texts[0])


def _find_daemon(directories: Sequence[str], rank: int, ranks: int, uuid: str | None) -> Any:
    """The runtime directory of the daemon of a rank's GPU. Raises as endpoint.find_daemon."""
    if directories:
        return locate_daemon(directories[rank])
    try:
        return find_daemon(uuid)
    except Gone:
        if ranks > 1 or uuid is None:
            raise
        return find_daemon()  # it refuses tensors of another GPU
