"""Which bytes each command reads and writes, and which commands are ordered."""
