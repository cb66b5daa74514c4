"""Fewer calls: what one call of a library computes as well."""
