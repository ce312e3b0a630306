"""The plugin, and the Hypothesis profiles: `--hypothesis-profile=nightly` searches long, `dev` anew each time."""

from hypothesis import settings

pytest_plugins = ["verifier.pytest_plugin"]
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100, database=None)
settings.register_profile("dev", deadline=None, max_examples=100)
settings.register_profile("nightly", deadline=None, max_examples=5_000)
settings.load_profile("ci")
