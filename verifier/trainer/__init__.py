"""The training run: a controller, ranks that serve its calls, the run's folder."""
