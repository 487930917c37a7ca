"""LoRA adapters whose weights change while the engine runs. Used in the scheduler's thread.

vLLM's block hashes contain an adapter's name, and in newer versions its path, but not its weights.
If other weights are loaded under the same hashes, the stored blocks belong to the old ones. So
requests with such an adapter neither load nor store, until a reset has removed all keys. Requests
that were there before the reset never do: they may have KV of several weights.

Other keys for the new weights would not be enough: until vLLM's own cache is reset, requests find
blocks of the old weights there, and would store them under the new keys.

Weights change if vLLM loads an adapter again: under another id, in place, or after it was removed.
The scheduler sees ids in requests. It sees no other load, so vLLM's engine reports those
(`watch_loads`). If the files are the same as at the last load, nothing has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from kvferry.client.engines.model_files import identify_files

log = logging.getLogger("kvferry")


@dataclass(slots=True)
class Adapter:
    """The loads of an adapter, which is identified by its block hashes.

    loaded_as: the id and the path of its last load. files: identifies its files at that time; "" if
    that is not known. removed: from the engine, so that its next use loads it. changes: how often
    other weights were loaded. is_stale: whether one of these was after the last reset.
    """

    loaded_as: tuple[int, str] | None = None
    files: str = ""
    removed: bool = False
    changes: int = 0
    is_stale: bool = False


class Adapters:
    """The adapters of an engine, and the requests that use them.

    In its methods, `hashed` is what vLLM's block hashes contain of an adapter, and `lora` is vLLM's
    LoRARequest.
    """

    def __init__(self) -> None:
        self._adapters: dict[tuple[Any, ...], Adapter] = {}
        # The adapter of each request, and its number of changes when the request arrived.
        self._requests: dict[str, tuple[Adapter, int]] = {}

    def begin_request(self, request: str, hashed: tuple[Any, ...], lora: Any) -> None:
        # If a request has load_inplace, vLLM reads the files in each of its steps.
        adapter = self.load(hashed, lora, in_each_step=lora.load_inplace)
        self._requests[request] = adapter, adapter.changes

    def end_request(self, request: str) -> None:
        """The request stores nothing from now on."""
        self._requests.pop(request, None)

    def may_use_keys(self, request: str) -> bool:
        """Whether a request may load and store."""
        if (used := self._requests.get(request)) is None:
            return True
        adapter, changes = used
        return not adapter.is_stale and adapter.changes == changes

    def load(self, hashed: tuple[Any, ...], lora: Any, *, in_each_step: bool = False) -> Adapter:
        """vLLM is about to load an adapter, if it does not have this id."""
        adapter = self._adapters.setdefault(hashed, Adapter())
        load = lora.lora_int_id, lora.lora_path
        if adapter.loaded_as == load and not adapter.removed and not lora.load_inplace:
            return adapter
        files = "" if in_each_step else identify_files(lora.lora_path)
        is_known = bool(files) and files == adapter.files
        if in_each_step or (adapter.loaded_as is not None and not is_known):
            if not adapter.changes:
                log_change(lora)
            adapter.changes += 1
            adapter.is_stale = True
        adapter.loaded_as, adapter.files, adapter.removed = load, files, False
        return adapter

    def remove(self, lora_id: int) -> None:
        """vLLM removes an adapter."""
        for adapter in self._adapters.values():
            if adapter.loaded_as is not None and adapter.loaded_as[0] == lora_id:
                adapter.removed = True

    def reset(self) -> None:
        """All keys are removed."""
        for adapter in self._adapters.values():
            adapter.is_stale = False


def log_change(lora: Any) -> None:
    log.warning(
        "kvferry: the weights of the LoRA adapter %r (%s) have changed, or may have: its requests "
        "neither load nor store KV before reset_prefix_cache is called with reset_connector. Call "
        "it after each change, or load changed weights under another name and from another path",
        lora.lora_name,
        lora.lora_path,
    )


@cache
def watch_loads() -> None:
    """Let vLLM's engines of this process report to their connectors what they load and remove.

    Requests do not show it: vLLM's API server loads in place under the id that the adapter has. The
    files are read before vLLM reads them: if they change between, the next load seems a change.
    """
    from vllm.v1.engine.core import EngineCore

    add, remove = EngineCore.add_lora, EngineCore.remove_lora

    @wraps(add)
    def report_and_add(engine: Any, lora_request: Any) -> Any:
        for connector in _connectors(engine):
            connector.load_adapter(lora_request)
        return add(engine, lora_request)

    @wraps(remove)
    def report_and_remove(engine: Any, lora_id: int) -> Any:
        for connector in _connectors(engine):
            connector.remove_adapter(lora_id)
        return remove(engine, lora_id)

    EngineCore.add_lora, EngineCore.remove_lora = report_and_add, report_and_remove


def _connectors(engine: Any) -> Iterator[Any]:
    """kvferry's connectors of an engine, also those in a MultiConnector."""
    connector = engine.scheduler.get_kv_connector()
    for child in getattr(connector, "_connectors", (connector,)):
        if hasattr(child, "load_adapter"):
            yield child
