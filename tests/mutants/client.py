"""Mutants of the client: client/, without the parts for engines."""

from __future__ import annotations

from mutants.source_mutant import SourceMutant

CLIENT = "client/kvferry/client"

MUTANTS = (
    SourceMutant(
        "GPU blocks of ended jobs count as in flight",
        f"{CLIENT}/jobs.py",
        "        self._gpu_blocks -= job.gpu_blocks\n",
        "",
        ("tests/client/test_jobs.py",),
    ),
    SourceMutant(
        "the last credit of a direction cannot be used",
        f"{CLIENT}/jobs.py",
        "if in_flight + parts > limits",
        "if in_flight + parts >= limits",
        ("tests/client/test_jobs.py",),
    ),
    SourceMutant(
        "a job whose first part has failed is reported as done",
        f"{CLIENT}/jobs.py",
        "if whole.outcome is not Outcome.DONE or part.outcome is not Outcome.DONE:",
        "if part.outcome is not Outcome.DONE:",
        ("tests/client/test_jobs.py",),
    ),
    SourceMutant(
        "key events that a busy daemon has left out are not noticed",
        f"{CLIENT}/mirror.py",
        "follows = bool(message.events) and message.sequence == self.sequence + 1",
        "follows = message.sequence == self.sequence + 1",
        ("tests/client/test_mirror.py",),
    ),
    SourceMutant(
        "a mirror has keys from before a reset whose key events were left out",
        f"{CLIENT}/mirror.py",
        "if epoch not in self._epochs_since | {self.epoch}:",
        "if False:",
        ("tests/client/test_mirror.py",),
    ),
    SourceMutant(
        "a key that is pinned twice is pinned once after a reconnect",
        f"{CLIENT}/namespace.py",
        "key_batches(tuple(self._pins.elements()))",
        "key_batches(tuple(self._pins))",
        ("tests/client/test_session_reconnecting.py", "tests/client/test_namespace.py"),
    ),
    SourceMutant(
        "a revoked timeline is registered again, so that no job begins",
        f"{CLIENT}/restoring.py",
        "    if timeline.revoked:\n        timeline.renew()\n",
        "",
        ("tests/client/test_session_reconnecting.py",),
    ),
    SourceMutant(
        "a client reconnects without registering its tensors again",
        f"{CLIENT}/restoring.py",
        "    if state.registration is not None:\n",
        "    if state.registration is not None and state.region is None:\n",
        ("tests/flow/test_reconnecting.py",),
    ),
    SourceMutant(
        "an engine abandons its jobs, and a stopped daemon copies them later",
        f"{CLIENT}/session.py",
        """        if registration is not None and registration.timeline is not None:
            registration.timeline.revoke()
""",
        "",
        ("tests/client/test_session_reconnecting.py",),
    ),
    SourceMutant(
        "the pause between two attempts to connect grows without a bound",
        f"{CLIENT}/link.py",
        "self._backoff = min(2 * self._backoff, MAX_BACKOFF)",
        "self._backoff = 2 * self._backoff",
        ("tests/client/test_link.py",),
    ),
    SourceMutant(
        "results that arrived right before a disconnect are lost",
        f"{CLIENT}/link.py",
        """            if self.session.wire.has_socket:
                self.connection.receive_messages(self.session.receive_message)
                self.session""",
        """            if self.session.wire.has_socket:
                self.session""",
        ("tests/client/test_link.py", "tests/client/test_session_reconnecting.py"),
    ),
    SourceMutant(
        "a reply that arrived before a disconnect is an error",
        f"{CLIENT}/pending_requests.py",
        "            if reply is None:\n                self",
        "            if True:\n                self",
        ("tests/client/test_session.py", "tests/client/test_session_reconnecting.py"),
    ),
    SourceMutant(
        "a large transfer that begins within a host block is split at other GPU blocks",
        f"{CLIENT}/splitting.py",
        "np.clip((position - begins) * factor - skips, 0, sizes)",
        "np.clip((position - begins) * factor, 0, sizes)",
        ("tests/client/test_jobs.py", "tests/property/test_splitting_against_a_model.py"),
    ),
    SourceMutant(
        "host blocks of a lost store are loaded, if the caller reuses its array of ids",
        f"{CLIENT}/lost_stores.py",
        "hosts = host.block_ids.copy()",
        "hosts = host.block_ids",
        ("tests/client/test_session_reconnecting.py",),
    ),
    SourceMutant(
        "a load pins its keys at the daemon of the first rank only",
        f"{CLIENT}/manager.py",
        "        for client in self._clients:\n            client.pin(keys)\n",
        "        self._clients[0].pin(keys)\n",
        ("tests/client/test_manager_ranks.py", "tests/client/test_manager.py"),
    ),
    SourceMutant(
        "what was computed before a reset is stored after it",
        f"{CLIENT}/manager.py",
        "zip(self.writers.divide(wanted), epochs or self.epochs, strict=True)",
        "zip(self.writers.divide(wanted), self.epochs, strict=True)",
        ("tests/client/test_manager.py",),
    ),
    SourceMutant(
        "a descriptor that comes with an error stays open",
        f"{CLIENT}/transport/fd_client.py",
        """        except KVFerryError:
            for descriptor in received:
                os.close(descriptor)
            raise
""",
        """        except KVFerryError:
            raise
""",
        ("tests/client/test_fd_client.py",),
    ),
    SourceMutant(
        "a lookup waits without end for a daemon that does not answer a search",
        f"{CLIENT}/namespace.py",
        "search.deadline = now + SEARCH_TIMEOUT",
        "search.deadline = float('inf')",
        ("tests/client/test_tier_searches.py",),
    ),
    SourceMutant(
        "padded kernel blocks are copied as if they were contiguous",
        f"{CLIENT}/tensors/canonical.py",
        "if kernel_blocks > 1 and stride != dense:",
        "if kernel_blocks > 1 and stride < dense:",
        ("tests/client/tensors/test_canonical.py",),
    ),
    SourceMutant(
        "a tensor in private memory is registered",
        f"{CLIENT}/tensors/sharing.py",
        'if permissions[3] == "s" and inode != "0":',
        'if inode != "0":',
        ("tests/client/tensors/test_sharing.py",),
    ),
)
