"""Observers of a training run, of its ranks and of its controller, and the probes that they ask."""
