"""This repository's tiers and options, and Hypothesis profiles: `--hypothesis-profile=quick|ci|dev|nightly`."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of two workers on two cores would spin for their slices
pytest_plugins = ["tests.tiers"]
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100, database=None)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=25)
settings.register_profile("dev", deadline=None, max_examples=100)
settings.register_profile("nightly", deadline=None, max_examples=5_000)
settings.load_profile("ci")
