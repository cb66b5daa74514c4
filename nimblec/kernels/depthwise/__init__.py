"""Depthwise convolutions: each result reads one channel."""
