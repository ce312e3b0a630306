"""Inference engines in a process of their own: start, logprobs, state, poison, weight update, generate."""
