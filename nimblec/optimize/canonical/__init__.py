"""Graphs in one form: constants folded, what has no effect dropped, patterns called by their names."""
