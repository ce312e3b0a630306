"""What records evidence of a run; probes only look."""
