"""The plan file format, and files that are written whole or not at all."""
