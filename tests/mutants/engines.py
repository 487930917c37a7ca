"""Mutants of the connector for vLLM and the linker for SGLang, as far as neither is needed."""

from __future__ import annotations

from mutants.source_mutant import SourceMutant

VLLM, SGLANG = "client/kvferry/client/vllm", "client/kvferry/client/sglang"
ENGINES = "client/kvferry/client/engines"

MUTANTS = (
    SourceMutant(
        "blocks of which vLLM copies other bytes are loaded",
        f"{VLLM}/device_pointers.py",
        "if not (nbytes == self._pages).all():",
        "if False:",
        ("tests/client/vllm/test_device_pointers.py",),
    ),
    SourceMutant(
        "a rank that stores some keys of a request writes to other sub-blocks",
        f"{VLLM}/own_blocks.py",
        "indices.append(own[0][0][0] if own else 0)",
        "indices.append(index)",
        ("tests/client/vllm/test_own_blocks.py",),
    ),
    SourceMutant(
        "a request whose loads fail loads again without end",
        f"{VLLM}/scheduler_side.py",
        "        self._request.loads += 1\n",
        "",
        ("tests/client/vllm/test_scheduler_side.py",),
    ),
    SourceMutant(
        "keys whose load a reset has ended stay pinned",
        f"{VLLM}/scheduler_side.py",
        "        self._ended += self._loads.values()\n        self._loads.clear()\n",
        "        self._loads.clear()\n",
        ("tests/client/vllm/test_scheduler_side.py",),
    ),
    SourceMutant(
        "engines with another quantization share blocks",
        f"{VLLM}/fingerprint.py",
        '            ("quantization", read_path(vllm_config, "model_config.quantization")),\n',
        "",
        ("tests/client/vllm/test_fingerprint.py", "tests/client/vllm/test_fingerprint_fields.py"),
    ),
    SourceMutant(
        "engines with other seeds of their hashes share a namespace",
        f"{VLLM}/fingerprint.py",
        "hash_seed=_hash_seed(algorithm, vllm_config.kv_transfer_config.engine_id),",
        'hash_seed="",',
        ("tests/client/vllm/test_fingerprint_seeds.py",),
    ),
    SourceMutant(
        "blocks of jobs that do not end are reused while a daemon may copy them",
        f"{ENGINES}/rank_session.py",
        """                client.wait(job_ids, timeout=self._wait_timeout)
            except KVFerryError as error:
                self.abandon(error)
""",
        """                client.wait(job_ids, timeout=self._wait_timeout)
            except KVFerryError:
                pass
""",
        ("tests/client/vllm/test_worker_side.py::test_jobs_that_do_not_end_are_given_up",),
    ),
    SourceMutant(
        "slots that are no whole page are copied as the page before them",
        f"{SGLANG}/block_ids.py",
        "if len(first) != count or (first % source.slots).any():",
        "if len(first) != count:",
        ("tests/client/sglang/test_block_ids.py",),
    ),
    SourceMutant(
        "a batch of which one load has failed is computed",
        f"{SGLANG}/loads.py",
        "batch.success &= success",
        "batch.success |= success",
        ("tests/client/sglang/test_loads.py",),
    ),
    SourceMutant(
        "a layer is computed before its section is loaded",
        f"{SGLANG}/loads.py",
        "self._loaded.section_of(layer) + 1)",
        "self._loaded.section_of(layer))",
        ("tests/client/sglang/test_loads.py",),
    ),
    SourceMutant(
        "the layers of a request are loaded before the first ones of the next",
        f"{SGLANG}/loads.py",
        "        for section in (None, *range(self._loaded.sections)):\n"
        "            for keys, gpu in specs:\n",
        "        for keys, gpu in specs:\n"
        "            for section in (None, *range(self._loaded.sections)):\n",
        ("tests/client/sglang/test_loads.py",),
    ),
    SourceMutant(
        "keys of requests that ended without a load stay pinned",
        f"{SGLANG}/promises.py",
        "            del self._promises[rid]\n            self._release(promise)\n",
        "            del self._promises[rid]\n",
        ("tests/client/sglang/test_promises.py",),
    ),
    SourceMutant(
        "a request loads what it was promised before a reset",
        f"{SGLANG}/promises.py",
        "if promise.held_by != self._holder or self._client.gone is not None:",
        "if self._client.gone is not None:",
        ("tests/client/sglang/test_promises.py",),
    ),
    SourceMutant(
        "a node whose store has failed is not stored again",
        f"{SGLANG}/stores.py",
        "        self._manager.complete_store(store.keys)\n",
        "",
        ("tests/client/sglang/test_stores.py",),
    ),
    SourceMutant(
        "a prefix is restored without a page of its window",
        f"{SGLANG}/restorable.py",
        "if sums[n] - sums[max(0, n - needed)] == min(n, needed)]",
        "if sums[n] - sums[max(0, n - needed)] >= 1]",
        ("tests/client/sglang/test_restorable.py",),
    ),
    SourceMutant(
        "the scheduler packs layers of several sizes",
        "client/kvferry/client/vllm/packing.py",
        "for group in groups} != {block_bytes}:\n",
        "for group in groups} == set():\n",
        ("tests/client/vllm/test_packing.py",),
    ),
    SourceMutant(
        "quantized KV is packed",
        "client/kvferry/client/vllm/packing.py",
        """if dtype != "bfloat16" or hasattr(spec, "dtypes"):""",
        """if hasattr(spec, "dtypes"):""",
        ("tests/client/vllm/test_packing.py",),
    ),
    SourceMutant(
        "SGLang's quantized KV is packed",
        f"{SGLANG}/packing.py",
        "if buffer.dtype != torch.bfloat16:",
        "if buffer.dtype is None:",
        ("tests/client/sglang/test_packing.py",),
    ),
    SourceMutant(
        "sliding windows and states of SGLang are packed",
        f"{SGLANG}/packing.py",
        'if source.name != "kv":',
        "if not source.name:",
        ("tests/client/sglang/test_packing.py",),
    ),
)
