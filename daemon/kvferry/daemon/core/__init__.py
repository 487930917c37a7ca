"""Pure bookkeeping. No clock, no socket, no thread, no device: time and events are arguments."""
