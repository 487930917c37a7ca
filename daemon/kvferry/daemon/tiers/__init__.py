"""Tiers: storage for host blocks below the host pool.

    event loop                         process of a tier (one for each tier)
    TierClient --socket pair-->        TierWorker: main thread   contains, drop, usage
      deadlines, circuit breaker                   I/O threads   fetch (first), put
      ChildProcess: start, kill, reap              Tier          the blocking code: disk/, ...

The interface is `Tier` in base.py: `contains`, `fetch`, `put`, `drop`, `usage`, `maintain` and
`close`. Its methods are batched, block, and get addresses in the host pool, which the process maps.
A tier is a module with a function `open_tier(options, memory)` that returns a Tier; the
configuration names the module. Optional attributes of a Tier: `io_threads`, the number of threads
that call `fetch` and `put`, and `call_bytes`, the bytes that one call moves: larger batches are
split.

A tier that several daemons share has a method `generation(namespace)`, too. It returns a number
that changes when anyone drops the namespace, as far as the tier knows without asking; -1: not
known. It is called after each `contains`, and once per second for each namespace in the pool. When
the number has changed without a drop of this daemon, also while it did not run (generations.py),
the daemon drops the namespace from its pool and its other tiers. Before its first `put` for a
namespace, the daemon asks by a `contains` without keys, which must find the generation out. A `put`
names the generation of its blocks: those of another one than the current one must not be found by
anyone.

A tier that divides its room among namespaces may have a method `note_used(namespaces)`. It is
called once per second with the names of those that engines have open.

A tier made of the pools of other daemons has more methods. Once per second, `note_pool(generations,
windows)` is called with the generation in this daemon of each store in use, and with the memory of
other daemons that this one has mapped; `lent_files()` returns what it can map, and `siblings()`
their status. After each `contains`, `locate(namespace, keys)` returns which keys the daemon can
load from there. Its attribute `unequal` is the result for bytes that do not match their
checksum; without it they are CORRUPT.

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
- `drop` of a namespace is done when it returns: a crash afterwards does not bring keys back.
- A tier keeps its bound at every moment, with all overhead, and refuses (FULL) instead.
- Keys that `contains` reports may be gone when they are fetched.
"""
