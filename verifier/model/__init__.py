"""Models: supported families, generated checkpoints, and the reader of a checkpoint directory."""
