"""Compile for a GPU that is not there: its record, our own kernels and Inductor's, and a run on no data."""
