"""Arrays of callers: their dtypes, layouts and memory, taken in and given out."""
