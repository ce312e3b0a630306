"""Live parameters to checkpoint tensors, and the independent statement of where each lives."""
