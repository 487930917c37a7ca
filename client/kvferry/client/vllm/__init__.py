"""kvferry as a KV connector of vLLM. Install kvferry in vLLM's environment, start a daemon, and:

PYTHONHASHSEED=0 vllm serve MODEL --kv-transfer-config '{
    "kv_connector": "KVFerryConnector",
    "kv_connector_module_path": "kvferry.client.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 68719476736}}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.proto.errors import Code, Refused
from kvferry.proto.version import installed_version

if TYPE_CHECKING:
    from kvferry.client.vllm.connector import KVFerryConnector
    from kvferry.client.vllm.spec import KVFerrySpec

SUPPORTED = "0.26"
__all__ = ["KVFerryConnector", "KVFerrySpec", "SUPPORTED"]


def __getattr__(name: str) -> Any:
    if name not in ("KVFerryConnector", "KVFerrySpec"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "KVFerryConnector":
            from kvferry.client.vllm.connector import KVFerryConnector

            return KVFerryConnector
        from kvferry.client.vllm.spec import KVFerrySpec

        return KVFerrySpec
    except ImportError as error:
        message = f"kvferry supports vLLM {SUPPORTED}, but another version is installed: {error}"
        raise Refused(
            Code.BAD_CONFIG, message, f"vLLM {installed_version('vllm') or 'is not installed'}"
        ) from error
