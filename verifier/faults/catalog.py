"""All faults by id. Importing this module imports those of every stage, which fills the catalogue."""

from verifier.core.stage import modules_of
from verifier.faults.fault import CATALOG

list(modules_of("faults"))

__all__ = ["CATALOG"]
