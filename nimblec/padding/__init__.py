"""Which calls of other sizes the programs of a plan serve: by padding, or by splitting them.

The graph of a program proves what padding and splitting leave unchanged (`values`, `rules`, and an adaptor for each
kind of graph); runs of the program confirm it (`fits`, `trials`).
"""
