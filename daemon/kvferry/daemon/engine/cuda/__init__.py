"""The engine of NVIDIA GPUs, on the driver alone: no torch, no runtime library."""
