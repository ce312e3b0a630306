"""Rollouts to packed, aligned, sharded micro-batches."""
