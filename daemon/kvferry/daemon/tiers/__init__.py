"""Tiers: storage for host blocks below the host pool.

    event loop                         process of a tier (one for each tier)
    TierClient --socket pair-->        TierWorker: main thread   contains, drop, usage
      deadlines, circuit breaker                   I/O threads   fetch (first), put
      ChildProcess: start, kill, reap              Tier          the blocking code: disk/, ...

The interface is `Tier` in base.py. Its methods are batched, block, and get addresses in the host
pool, which the process maps. A tier is a module with a function `open_tier(options, memory)` that
returns a Tier; the configuration names the module. A class that inherits from Tier needs
`contains`, `fetch`, `put`, `drop` and `usage`.

A tier has *stores*: the blocks of one namespace, of one composition and one epoch. A reset of the
namespace is none of its business: the daemon uses another store from then on. When a tier starts,
it names the stores that it has (`stores`). The daemon takes epochs from there that it does not
know, and drops the stores of others.

A tier that several hosts share is a `SharedTier`. It has the epoch of each namespace, too, so that
a reset on one host reaches the others: `settle` makes it agree with that of this host.

Who owns a host block, and until when:

    fetch   The core reserves the block. From the request until `released` the tier may write into
            it, and nobody else may use it. If its result is OK, the bytes are those that were put:
            the worker has compared their checksum.
    put     The core pins the block. From the request until `released` the tier may read it. If it
            is overwritten meanwhile, the checksum does not match later, which is a miss.
    released ends with the answer of the process, or once the process was killed and reaped. So
            nothing that a tier began can write into a block that has another owner.

Rules for an implementation:

- A failure is a miss, never wrong bytes. `fetch` returns the checksum that `put` got, stored with
  the block. Length alone proves nothing.
- `put` of a key that is present may keep either block: both have the same bytes. If nothing was
  written, the result is PRESENT, so that it is not counted as a write.
- Nothing is asked of a store after its `drop`, so a crash may bring its blocks back.
- A tier keeps its bound at every moment, with all overhead, and refuses (FULL) instead.
- Keys that `contains` reports may be gone when they are fetched.
"""
