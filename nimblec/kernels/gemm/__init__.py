"""Convolutions, and products with few rows, as implicit matrix products."""
