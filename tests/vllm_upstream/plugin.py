"""pytest plugin: run vLLM's own tests of its offloading connector through kvferry's.

    make vllm-tests VLLM=0.33.0

kvferry's classes replace vLLM's before the tests are imported, and a daemon does the transfers
(daemon_worker.py). deviations.toml lists the tests that are expected to fail, with reasons and the
errors that they raise, for each minor version; of a newer vLLM, those of the newest supported one.
The run fails if a listed test passes, raises another error, or does not exist, or if another test
fails.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.client.vllm import NEWEST
from kvferry.proto.errors import Refused

# Listed tests that vLLM does not have.
UNKNOWN: pytest.StashKey[list[str]] = pytest.StashKey()
OFFLOADING = "tests.v1.kv_connector.unit.offloading_connector"
# The model that vLLM's tests name. They need only its configuration.
MODEL = "facebook/opt-125m"
MODEL_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "dtype": "float16",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
}

# Methods of kvferry's manager that vLLM's managers lack.
MANAGER_METHODS = "request_arrived", "begin_lookups", "is_resetting", "touch_keys", "attempt"
# Errors that deviations.toml names.
ERRORS = {"AssertionError": AssertionError, "Refused": Refused}


def provide_model() -> None:
    """Write the model's configuration into a download cache of transformers."""
    home = tempfile.mkdtemp(prefix="kvferry-models-")
    atexit.register(shutil.rmtree, home)
    revision = "0" * 40
    repository = Path(home, "hub", "models--" + MODEL.replace("/", "--"))
    snapshot = repository / "snapshots" / revision
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text(json.dumps(MODEL_CONFIG))
    os.environ |= {"HF_HOME": home, "HF_HUB_OFFLINE": "1"}


def replace_classes() -> None:
    """Replace the classes that vLLM's tests import by kvferry's, and provide a device."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker
    from vllm.platforms.interface import UnspecifiedPlatform
    from vllm.v1.kv_offload.base import OffloadingManager

    from kvferry.client.vllm.adapters import Adapters
    from kvferry.client.vllm.options import StoreMode
    from vllm_upstream.daemon_worker import ConnectorOverDaemon, WorkerOfTests, give_daemon

    # Some tests give the connector one of vLLM's managers, which lacks what kvferry's has besides.
    for name in MANAGER_METHODS:
        setattr(OffloadingManager, name, lambda *_, **__: None)
    OffloadingManager.adapters = Adapters()
    OffloadingManager.store_mode, OffloadingManager.late_stores = StoreMode.AT_ONCE, None
    UnspecifiedPlatform.device_type = "cpu"
    UnspecifiedPlatform.support_hybrid_kv_cache = classmethod(lambda cls: True)
    offloading_connector.OffloadingConnector = ConnectorOverDaemon
    worker.OffloadingConnectorWorker = WorkerOfTests
    give_daemon(importlib.import_module(f"{OFFLOADING}.utils"))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Replace the classes before vLLM's conftest.py imports them."""
    provide_model()
    sys.path.insert(0, str(early_config.rootpath))
    replace_classes()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the listed tests. An entry without parameters matches all parameters."""
    from vllm import __version__

    minor = listed_version(__version__)
    listed = tomllib.loads(Path(__file__).with_name("deviations.toml").read_text())
    unknown: list[str] = []
    for deviation in listed["deviation"]:
        if minor not in deviation["versions"]:
            continue
        for test in deviation["tests"]:
            found = [
                item
                for item in items
                if test in (name := item_name(item), without_parameters(name))
            ]
            if not found:
                unknown.append(test)
            for item in found:
                error = ERRORS[deviation["raises"]]
                mark = pytest.mark.xfail(reason=deviation["reason"], raises=error, strict=True)
                item.add_marker(mark)
    if all(Path(argument).is_dir() for argument in config.args):
        config.stash[UNKNOWN] = unknown


def listed_version(version: str) -> str:
    """The version in deviations.toml whose tests are expected to fail with this vLLM."""
    major, minor = (int(number) for number in version.split(".")[:2])
    return ".".join(map(str, min((major, minor), NEWEST)))


def item_name(item: pytest.Item) -> str:
    """As listed: test_scheduler.py::TestEagle::test_full_attn_lookup_no_hits_returns_zero."""
    return item.nodeid.rsplit("/", 1)[-1]


def without_parameters(name: str) -> str:
    return name.partition("[")[0]


@pytest.fixture(autouse=True)
def close_workers() -> Iterator[None]:
    from vllm_upstream.daemon_worker import daemon

    yield
    daemon.end_test()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(UNKNOWN, []):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from vllm_upstream.daemon_worker import daemon

    for test in config.stash.get(UNKNOWN, []):
        terminalreporter.write_line(f"deviations.toml lists {test}, which this vLLM does not have")
    blocks = daemon.transferred_blocks
    terminalreporter.write_line(f"{blocks} GPU blocks were stored or loaded and checked")


def pytest_unconfigure() -> None:
    from vllm_upstream.daemon_worker import daemon

    daemon.close()
