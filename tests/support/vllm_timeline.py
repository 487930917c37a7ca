"""The moments of one request in KVFerryConnector, for measurements over a real `vllm serve`.

A connector that notes when vLLM calls it. Both its processes append lines of JSON to the file
KVFERRY_TIMELINE: [seconds of time.perf_counter, name]. On Linux this clock is the same in all
processes.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvferry.client.vllm import KVFerryConnector

NAME = "TimelineConnector"
if NAME not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(NAME, "support.vllm_timeline", NAME)


def note(name: str) -> None:
    with open(os.environ["KVFERRY_TIMELINE"], "a") as file:
        file.write(json.dumps([time.perf_counter(), name]) + "\n")


class TimelineConnector(KVFerryConnector):
    def on_new_request(self, request: Any) -> None:
        note("the scheduler has the request")
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        note("looked up" if found[0] else "lookup without an answer")
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        note("GPU blocks allocated")

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        if metadata.load_jobs:
            note("load planned")
        if scheduler_output.total_num_scheduled_tokens:
            note("tokens scheduled")
        return metadata

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        super().handle_preemptions(kv_connector_metadata)
        if kv_connector_metadata.load_jobs:
            note("load submitted")

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        if received:
            note("load has ended")
        return sent, received

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        note("the scheduler has the worker's output")
