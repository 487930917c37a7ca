"""All mutants of source files."""

from __future__ import annotations

from mutants import client, core, daemon, engines, proto, storage
from mutants.source_mutant import SourceMutant

MUTANTS: tuple[SourceMutant, ...] = (
    *proto.MUTANTS,
    *client.MUTANTS,
    *engines.MUTANTS,
    *core.MUTANTS,
    *storage.MUTANTS,
    *daemon.MUTANTS,
)
