"""Checkpoints: supported families, generated tiny checkpoints, and the reader of a local directory."""
