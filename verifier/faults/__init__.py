"""Re-enacted bugs: a table of faults, the means to inject and heal them, and the trial that a fault has to pass."""
