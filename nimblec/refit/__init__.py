"""New weights for a loaded plan: the parts that both targets share."""
