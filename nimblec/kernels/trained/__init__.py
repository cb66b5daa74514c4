"""Convolutions whose weights are trained: forward, and the gradients of their images and weights."""
