"""Sockets and sessions, on the event loop. The server passes messages to the core."""
