"""Log-probabilities that the engine computes with what it holds."""
