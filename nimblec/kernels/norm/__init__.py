"""Layer norm and RMS norm, with the sum before them."""
