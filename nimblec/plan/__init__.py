"""The plan file: how nimblec writes what nimblert reads."""
