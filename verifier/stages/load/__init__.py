"""Checkpoint to live Megatron parameters."""
