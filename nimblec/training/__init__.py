"""Capture training steps written in PyTorch."""
