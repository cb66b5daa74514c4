"""Fewer calls: several fused into one call of a library."""
