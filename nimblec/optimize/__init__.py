"""Rewrites of a model's ATen graph that keep its meaning and its precision."""
