"""The device worker: the one thread that owns the device, and its queues."""
