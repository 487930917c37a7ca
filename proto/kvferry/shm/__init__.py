"""Memory that the client and the daemon share. Imports the standard library and the errors only."""
