"""Arrays of the caller: dtypes, layouts, padding, and the protocols by which libraries exchange them."""
