"""Data set to the examples and rollouts of a step."""
