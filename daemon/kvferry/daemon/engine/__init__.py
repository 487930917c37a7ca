"""Copies bytes. `base` is the interface, `reference` the CPU, `cuda` the GPU."""
