"""Transfers of one block by number."""

from __future__ import annotations

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec


def store(gpu: int, host: int) -> TransferSpec:
    return GPULoadStoreSpec([gpu]), CPULoadStoreSpec([host])


def load(host: int, gpu: int) -> TransferSpec:
    return CPULoadStoreSpec([host]), GPULoadStoreSpec([gpu])
