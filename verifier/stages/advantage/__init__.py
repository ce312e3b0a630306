"""Rewards and masks to the advantage and the weight of each token."""
