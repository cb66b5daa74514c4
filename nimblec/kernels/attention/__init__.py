"""Attention for short sequences."""
