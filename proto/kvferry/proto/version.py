"""Versions of installed packages. Called by the daemon, the client and its commands at start.

kvferry's version is that of the git tag. Between two tags it names the commit that was installed;
an editable install keeps it until it is installed again.
"""

from __future__ import annotations

from importlib import metadata


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def kvferry_version() -> str:
    """The version of this kvferry; "0+source" if it runs from a source tree."""
    return installed_version("kvferry") or "0+source"
