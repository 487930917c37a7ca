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

OLDEST, NEWEST = (0, 26), (0, 33)
SUPPORTED = "0.26 to 0.33"
__all__ = ["KVFerryConnector", "KVFerrySpec", "NEWEST", "OLDEST", "SUPPORTED"]


# The connectors by which vLLM replaces kv_connector if --kv-offloading-size is given. It then looks
# for them here, because kv_connector_module_path is still kvferry's.
REPLACEMENTS = "OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector"


def __getattr__(name: str) -> Any:
    if name in REPLACEMENTS:
        message = (
            f"--kv-offloading-size (kv_offloading_size) makes vLLM use {name} instead of "
            "KVFerryConnector; remove it, and set cpu_bytes_to_use in kv_connector_extra_config"
        )
        raise Refused(Code.BAD_CONFIG, message, name)
    if name not in ("KVFerryConnector", "KVFerrySpec"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "KVFerryConnector":
            from kvferry.client.vllm.connector import KVFerryConnector

            return KVFerryConnector
        from kvferry.client.vllm.spec import KVFerrySpec

        return KVFerrySpec
    except (ImportError, AttributeError, TypeError) as error:
        version = installed_version("vllm")
        found = "it is not installed" if version is None else f"{version} is installed"
        message = f"kvferry supports vLLM {SUPPORTED}, but {found}: {error}"
        raise Refused(Code.BAD_CONFIG, message, version or "no vLLM") from error
