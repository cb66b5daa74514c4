"""Benchmarks: each prints its table and writes the raw figures under bench/results."""
