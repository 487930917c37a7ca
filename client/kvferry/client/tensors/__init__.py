"""Canonical KV caches, and sharing them with the daemon."""

from kvferry.client.tensors.canonical import CanonicalKVCaches, canonicalize
from kvferry.client.tensors.sharing import shared_empty

__all__ = ["CanonicalKVCaches", "canonicalize", "shared_empty"]
