"""New weights for a loaded plan: what the refits of both targets have in common."""
