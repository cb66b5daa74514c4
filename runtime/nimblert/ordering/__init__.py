"""Which bytes the commands of a program touch, and which commands are ordered."""
