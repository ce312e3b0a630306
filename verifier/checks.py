"""All checks. Importing this module imports those of every stage, then plugins, which fill `core.check.REGISTRY`."""

from verifier.core.plugins import load_plugins
from verifier.core.stage import modules_of

list(modules_of("checks"))
load_plugins()
