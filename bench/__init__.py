"""Benchmarks: each prints what it measured and writes the raw figures under bench/results."""
