"""The event loop: sockets, sessions and timers. Asks the core and performs its actions."""
