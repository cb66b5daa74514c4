"""Five model families in plain torch.nn with random weights, small enough to export in a test."""
