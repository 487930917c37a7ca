"""The one thread that owns a device: enqueues, polls, reports."""
