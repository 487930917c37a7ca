"""Canonical KV caches, and sharing them with the daemon. The only part that needs torch."""

try:
    from kvferry.client.tensors.canonical import CanonicalKVCaches, canonicalize
    from kvferry.client.tensors.sharing import shared_empty
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    message = "torch is not installed; pip install '.[tensors]' in a checkout of kvferry"
    raise ModuleNotFoundError(message, name=error.name) from error

__all__ = ["CanonicalKVCaches", "canonicalize", "shared_empty"]
