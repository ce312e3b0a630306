"""Sweep of layouts and token budgets: real optimizer steps on made-up rollouts, up to out of memory."""
