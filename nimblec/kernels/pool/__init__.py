"""Max and average pooling, and means over images."""
