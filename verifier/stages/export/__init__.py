"""Live parameters to checkpoint tensors."""
