"""The gate: a matrix of judged runs, and a decision on a release."""
