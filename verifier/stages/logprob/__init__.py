"""Trainer forward and log-probabilities."""
