"""State of a run to files, and back."""
