"""Calls of the CUDA driver that the client and the daemon share. Imports numpy and ctypes only."""
