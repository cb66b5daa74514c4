"""Graphs in float32 computed in half precision."""
