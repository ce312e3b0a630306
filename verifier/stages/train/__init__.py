"""Optimizer step."""
