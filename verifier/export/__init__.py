"""Export of parameters as checkpoint tensors, and the independent table of their places."""
