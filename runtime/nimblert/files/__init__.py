"""Plan files: their bytes, and how files are written."""
