"""What every part of the compiler shares: options, errors, the IR, sources of models."""
