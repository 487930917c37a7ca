"""The asyncio loop: sockets, sessions, deadlines. Asks the core, performs what it answers."""
