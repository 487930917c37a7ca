"""The wire between kvferry's daemon and its clients. Imports msgspec and numpy, nothing else."""
