"""What runs: golden, round trip, noise; each on one runner."""
