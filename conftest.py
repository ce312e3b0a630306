"""This repository's tiers and options, and Hypothesis profiles: `--hypothesis-profile=quick|ci|dev|nightly`."""

from hypothesis import settings

pytest_plugins = ["tests.tiers"]
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100, database=None)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=25)
settings.register_profile("dev", deadline=None, max_examples=100)
settings.register_profile("nightly", deadline=None, max_examples=5_000)
settings.load_profile("ci")
