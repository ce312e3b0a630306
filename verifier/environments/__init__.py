"""Environments: what answers a turn of a policy, in text."""
