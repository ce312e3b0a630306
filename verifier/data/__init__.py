"""Rollouts and trajectories: what the engine hands to the trainer, before any layout."""
