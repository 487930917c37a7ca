"""State that survives a restart: block tables, checksums, and the verification of both."""
