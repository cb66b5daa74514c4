"""Capture models written in PyTorch."""
