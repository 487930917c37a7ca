"""kvferry as an external linker of SGLang's cache. Install kvferry in SGLang's environment, start a
daemon, and:

python -m sglang.launch_server --model-path MODEL --page-size 64 \\
    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic \\
    --unified-cache-external-linker-config '{
        "linker": "KVFerryLinker",
        "linker_module_path": "kvferry.client.sglang",
        "linker_extra_config": {"cpu_bytes_to_use": 68719476736}}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.proto.errors import Code, Refused
from kvferry.proto.version import installed_version

if TYPE_CHECKING:
    from kvferry.client.sglang.linker import KVFerryLinker

SUPPORTED = "0.5.23"
__all__ = ["SUPPORTED", "KVFerryLinker"]


def __getattr__(name: str) -> Any:
    if name != "KVFerryLinker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvferry.client.sglang.linker import KVFerryLinker
    except (ImportError, AttributeError) as error:
        version = installed_version("sglang")
        found = "it is not installed" if version is None else f"{version} is installed"
        message = (
            f"kvferry supports SGLang {SUPPORTED}, but {found}: {error}; "
            f"pip install 'sglang=={SUPPORTED}'"
        )
        raise Refused(Code.BAD_CONFIG, message, version or "no SGLang") from error
    return KVFerryLinker
