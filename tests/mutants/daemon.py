"""Mutants of the daemon's device worker, engines, memory, sockets and checks of itself."""

from __future__ import annotations

from mutants.source_mutant import SourceMutant

DAEMON = "daemon/kvferry/daemon"
TESTS = "tests/daemon"

MUTANTS = (
    SourceMutant(
        "a copy begins before its host memory is registered",
        f"{DAEMON}/device/transfer_queues.py",
        "if self.unmapping or plan.host_end > pool_ready:",
        "if self.unmapping:",
        (f"{TESTS}/device/test_transfer_queues.py", f"{TESTS}/device/test_device_worker.py"),
    ),
    SourceMutant(
        "jobs that an engine has abandoned are copied",
        f"{DAEMON}/device/transfer_queues.py",
        "(plan.after > 0 and self._behind(plan) is not None) or self.revoked",
        "plan.after > 0 and self._behind(plan) is not None",
        (f"{TESTS}/device/test_transfer_queues.py", f"{TESTS}/device/test_device_worker.py"),
    ),
    SourceMutant(
        "a load of blocks whose store fails meanwhile copies undefined bytes",
        f"{DAEMON}/device/transfer_queues.py",
        """            if serial in load.plan.requires:
                load.failed_store = serial
""",
        """            if serial in load.plan.requires:
                pass
""",
        (f"{TESTS}/device/test_transfer_queues.py", f"{TESTS}/device/test_device_worker.py"),
    ),
    SourceMutant(
        "a job that was abandoned while it was copied is done",
        f"{DAEMON}/device/transfer_queues.py",
        "self.transfer.abort(Outcome.CANCELLED)\n",
        "pass\n",
        (f"{TESTS}/device/test_transfer_queues.py", f"{TESTS}/device/test_device_worker.py"),
    ),
    SourceMutant(
        "each registration leaves descriptors open",
        f"{DAEMON}/device/mappings.py",
        """                if descriptor is not None:
                    close_descriptor_later(descriptor)
        self.queues""",
        """                if descriptor is not None:
                    pass
        self.queues""",
        (f"{TESTS}/device/test_mappings.py",),
    ),
    SourceMutant(
        "blocks that are not adjacent in host memory are copied as one run",
        f"{DAEMON}/engine/cuda/coalescing.py",
        "!= block_bytes) + 1",
        "> block_bytes) + 1",
        (f"{TESTS}/engine/cuda/test_coalescing.py",),
    ),
    SourceMutant(
        "the staging buffer of ended chunks is not free again",
        f"{DAEMON}/engine/cuda/staging.py",
        "            self._used[direction] &= ~slot.mask\n",
        "            pass\n",
        (f"{TESTS}/engine/cuda/test_staging.py",),
    ),
    SourceMutant(
        "a client is told of fewer key events than were left out",
        f"{DAEMON}/transport/outbox.py",
        "encode(KeyEvents(missed.sequence, (), missed.epoch))",
        "encode(KeyEvents(missed.sequence - 1, (), missed.epoch))",
        (f"{TESTS}/transport/test_outbox.py",),
    ),
    SourceMutant(
        "messages of clients that disconnect count as waiting for ever",
        f"{DAEMON}/transport/ingress.py",
        "            self._count -= len(queue.messages)\n",
        "",
        (f"{TESTS}/transport/test_ingress.py",),
    ),
    SourceMutant(
        "descriptors of a refused packet stay open",
        f"{DAEMON}/transport/fd_server.py",
        """        finally:
            for descriptor in descriptors:
                close_received_fd(descriptor)
            self._close_connection(number)
""",
        """        finally:
            self._close_connection(number)
""",
        (f"{TESTS}/transport/test_fd_server.py",),
    ),
    SourceMutant(
        "descriptors of a session stay open when it ends",
        f"{DAEMON}/transport/fd_server.py",
        "        for descriptor in self._held.pop(session, {}).values():\n",
        "        for descriptor in ():\n",
        (f"{TESTS}/transport/test_fd_server.py",),
    ),
    SourceMutant(
        "the pool is lent to a daemon of another user",
        f"{DAEMON}/transport/lender.py",
        "if uid != os.geteuid():",
        "if False:",
        (f"{TESTS}/transport/test_lender.py",),
    ),
    SourceMutant(
        "a sibling can write into the pool that it borrows",
        f"{DAEMON}/transport/lender.py",
        "os.O_RDONLY | os.O_CLOEXEC",
        "os.O_RDWR | os.O_CLOEXEC",
        (f"{TESTS}/transport/test_lender.py",),
    ),
    SourceMutant(
        "a user who connects often enough is shut out",
        f"{DAEMON}/access/connections.py",
        "            self._live[process.uid] -= 1\n",
        "",
        (f"{TESTS}/access/test_connections.py",),
    ),
    SourceMutant(
        "sockets are made in a directory of another user",
        f"{DAEMON}/access/runtime_directory.py",
        "        _check_owner(directory, os.geteuid())\n",
        "",
        (f"{TESTS}/access/test_runtime_directory.py",),
    ),
    SourceMutant(
        "a GPU that returns other bytes is healthy",
        f"{DAEMON}/observability/probe.py",
        "if ctypes.string_at(self._address + PAGE, PAGE) != pattern:",
        "if False:",
        (f"{TESTS}/observability/test_probe.py",),
    ),
    SourceMutant(
        "a daemon whose device worker hangs is not restarted",
        f"{DAEMON}/observability/health.py",
        "if self._pong_overdue(now) <= self._timeouts.worker:",
        "if True:",
        (f"{TESTS}/observability/test_health.py",),
    ),
    SourceMutant(
        "a tile with too many escapes counts as packed",
        f"{DAEMON}/engine/packing.py",
        "return packed, counts <= ESCAPES",
        "return packed, counts <= 2 * ESCAPES",
        (f"{TESTS}/engine/test_packing.py",),
    ),
    SourceMutant(
        "padding of zeros cannot be packed",
        f"{DAEMON}/engine/packing.py",
        "    codes[exponents == 0] = ZERO\n",
        "",
        (f"{TESTS}/engine/test_packing.py",),
    ),
    SourceMutant(
        "a GPU's mark of a block that cannot be packed stays, for the next block in its slot",
        f"{DAEMON}/engine/cuda/staged.py",
        "        self._marks[places[found]] = 0\n",
        "",
        (f"{TESTS}/engine/cuda/test_staged.py", f"{TESTS}/engine/test_contract.py"),
    ),
    SourceMutant(
        "the device worker does not say which blocks could not be packed",
        f"{DAEMON}/device/transfer_queues.py",
        "            self.transfer.unpackable.append(self.extent.host_offsets[positions])\n",
        "            pass\n",
        ("tests/flow/test_packing.py",),
    ),
)
