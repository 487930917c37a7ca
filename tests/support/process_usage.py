"""Resources that the kernel counts for a process, to detect leaks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Resources that a process uses.

    descriptors, threads, mappings: how many. private, shared: resident bytes of either kind.
    """

    descriptors: int
    threads: int
    mappings: int
    private: int
    shared: int

    @classmethod
    def of(cls, pid: int) -> ProcessUsage:
        """Raises OSError (FileNotFoundError) if the process has ended."""
        proc = Path(f"/proc/{pid}")
        lines = (proc / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)

        def nbytes(name: str) -> int:
            return int(fields[name].split()[0]) * 1024

        return cls(
            descriptors=len(os.listdir(proc / "fd")),
            threads=int(fields["Threads"]),
            mappings=(proc / "maps").read_text().count("\n"),
            private=nbytes("RssAnon") + nbytes("RssFile"),
            shared=nbytes("RssShmem"),
        )

    def since(self, before: ProcessUsage) -> ProcessUsage:
        """The difference of each field."""
        return ProcessUsage(
            self.descriptors - before.descriptors,
            self.threads - before.threads,
            self.mappings - before.mappings,
            self.private - before.private,
            self.shared - before.shared,
        )


def device_bytes(device: str) -> int:
    """Device memory in use by all processes; 0 on the CPU."""
    if not device.startswith("cuda"):
        return 0
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
