"""vLLM's own core loop over the scheduler and the worker of vllm_core.py.

The loop decides when an engine without unfinished requests runs another step. The executor runs the
worker in the thread of the loop, as vLLM's does for one GPU. Importing this needs vLLM.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from support.vllm_core import EngineCore


@dataclass(slots=True)
class LoopStep:
    """One step of the worker. tokens: that it computes, by request. stored: the keys of the stores
    that it submits."""

    tokens: dict[str, int]
    stored: list[bytes] = field(default_factory=list)


class CoreLoop(EngineCoreProc):
    """batches: that may be in flight: 2 for an engine that overlaps, else the pipeline stages.

    executed: called after each step of the worker, before the scheduler gets its output. `steps`:
    all steps of the worker.
    """

    def __init__(
        self,
        engine: EngineCore,
        executed: Callable[[LoopStep], None] = lambda _: None,
        *,
        batches: int = 1,
    ) -> None:
        self.steps: list[LoopStep] = []
        self._engine, self._executed = engine, executed
        self.scheduler, self.model_executor = engine.scheduler, self
        self.batch_queue_size = batches
        self.batch_queue: Any = deque(maxlen=batches) if batches > 1 else None
        self.step_fn = self.step_with_batch_queue if batches > 1 else self.step
        self.aborts_queue, self.output_queue = queue.Queue[Any](), queue.Queue[Any]()
        self.engines_running = self.log_stats = False
        self.check_for_draft_tokens = self.is_pooling_model = self.is_mm_encoder_only = False
        self.is_ec_consumer = True
        self._weight_version = None
        observed = SimpleNamespace(enable_logging_iteration_details=False)
        self.vllm_config = SimpleNamespace(observability_config=observed)
        self._result: Future[Any] = Future()
        self._record_stores()

    def run_until_idle(self) -> None:
        """Run steps as long as vLLM's busy loop does."""
        while self.has_work():
            self._process_engine_step()

    def last_prefill_step(self, name: str, tokens: int) -> int:
        """The number of the step that computes the last one of this many tokens of a request."""
        computed = accumulate(step.tokens.get(name, 0) for step in self.steps)
        return next(number for number, total in enumerate(computed) if total >= tokens)

    # The executor

    def execute_model(self, output: Any, non_block: bool) -> Future[Any]:
        self.steps.append(LoopStep(dict(output.num_scheduled_tokens)))
        self._result = Future()
        self._result.set_result(self._engine.execute(output))
        self._executed(self.steps[-1])
        if not output.total_num_scheduled_tokens:
            return self._result
        unsampled: Future[Any] = Future()
        unsampled.set_result(None)
        return unsampled

    def sample_tokens(self, _grammar: Any, non_block: bool = False) -> Any:
        return self._result if non_block else self._result.result()

    def _record_stores(self) -> None:
        worker = self._engine.worker.connector_worker.worker
        submit = worker.submit_store

        def record_and_submit(job_id: int, blocks: Any, keys: Any) -> bool:
            self.steps[-1].stored += keys.keys
            return bool(submit(job_id, blocks, keys))

        worker.submit_store = record_and_submit
