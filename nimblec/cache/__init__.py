"""The caches that outlive a compilation: plans of model files, and measured times."""
