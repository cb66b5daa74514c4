"""Float32 graphs computed in half precision."""
