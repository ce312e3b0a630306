"""Golden, round trip and noise, each on the one runner."""
