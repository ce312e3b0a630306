"""The trainer: packing, log-probabilities, loss, and the step on Megatron."""
