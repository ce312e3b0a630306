"""Records of how a run ended."""

from __future__ import annotations

from verifier.core.record import Count, Record


class Unbounded(Record, frozen=True, kw_only=True, tag="load/unbounded"):
    """Evidence of a recorded loop that is there and that nothing bounds; the name is the kind of its records."""

    why: str
    """Clause such as "the optimizer's weights are in bfloat16"."""


class StackFailure(Record, frozen=True, kw_only=True, tag="load/stack-failure"):
    """A failure inside the stack under test that ended a run, in any stage: `at` names it, not the kind.

    `name` is the party that failed, such as "trainer rank 1" or "the engine".
    """

    package: str = ""
    """Distribution, such as "megatron-bridge"."""
    package_version: str = ""
    file: str = ""
    """File from the package's top folder on, such as "megatron/bridge/models/olmoe/olmoe_bridge.py"."""
    line: Count = 0
    function: str = ""
    """Innermost function of the package that was running."""
    message: str = ""
    """Kind and text of the exception, in one line; empty where nothing failed."""
    missing: str = ""
    """Module that is not installed, where that was the failure."""
    stand_in: str = ""
    """File and line of the CPU tier's stand-in that the function had called, if the exception came out of one."""
    place: str = ""
    """Mesh coordinates of a rank."""
    at: str = ""
    """Label of the stage; empty until the run knows it."""
    during: Count = 0
    """Weight version under way. `version` stays 0, since no other rank need have come so far."""

    @property
    def where(self) -> str:
        """File and line; the package where it answered and raised nothing."""
        return f"{self.file}:{self.line}" if self.file else self.package

    @property
    def owner(self) -> str:
        """The party, with its coordinates."""
        return f"{self.name} ({self.place})" if self.place else self.name

    @property
    def sentence(self) -> str:
        """Package, version, place in it and message."""
        what = f"the module `{self.missing}` is not installed" if self.missing else self.message
        place = f", {self.where} in {self.function}" if self.file else ""
        return f"{self.package} {self.package_version}{place}: {what}"
