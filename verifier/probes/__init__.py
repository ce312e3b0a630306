"""Recorders of a run's evidence; probes only look."""
