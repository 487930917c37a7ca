"""Where tensors meet the daemon. Needs torch; submitting and polling do not come here."""

from kvferry.client.tensors.canonical import CanonicalKVCaches, canonicalize
from kvferry.client.tensors.sharing import shared_empty

__all__ = ["CanonicalKVCaches", "canonicalize", "shared_empty"]
