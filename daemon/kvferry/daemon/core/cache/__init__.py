"""Residency: the cache of one namespace and its eviction policies."""
