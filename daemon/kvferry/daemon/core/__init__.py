"""Bookkeeping without clock, socket, thread or device: time and events are arguments."""
