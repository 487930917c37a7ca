"""Host memory: the pool, NUMA placement, shared memory, closing without blocking."""
