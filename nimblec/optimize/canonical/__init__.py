"""One form for each idea: constants folded, calls without effect dropped, patterns recognised."""
