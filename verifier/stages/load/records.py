"""Records of the stage `load`: checkpoint to live Megatron parameters."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, at_load, every_rank, once, per_export, per_step, per_update
from verifier.core.record import Count, Digest, Real, Record, TensorRecord


class ConfigRecord(Record, frozen=True, kw_only=True):
    """Values of a configuration."""

    values: dict[str, str]
    """JSON of each value, by key."""


class SourceConfig(ConfigRecord, frozen=True, kw_only=True, tag="load/config"):
    """The source's config.json as transformers reads it."""

    owed = (Owed(anyone, per_export),)


class StatedConfig(ConfigRecord, frozen=True, kw_only=True, tag="load/stated-config"):
    """The source's config.json as it stands, with transformers' defaults for keys that it does not have."""


class FilesRecord(Record, frozen=True, kw_only=True):
    """The files beside a checkpoint's weights and config.json: tokenizer, generation settings, code."""

    digests: dict[str, Digest]
    """Digest of each file's bytes, by its name."""


class SourceFiles(FilesRecord, frozen=True, kw_only=True, tag="load/files"):
    """Files of the source, but for weights in other forms than safetensors."""


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


class KnobsAsked(Record, frozen=True, kw_only=True, tag="load/asked"):
    """Settings that the config asks of Megatron, its optimizer and its scheduler."""

    owed = (Owed(anyone, per_step),)

    values: dict[str, str]
    """Knob -> value as text; knobs that leave upstream's own value are absent."""


class KnobsReached(Record, frozen=True, kw_only=True, tag="load/reached"):
    """Settings that one rank's live objects hold when an optimizer step has been taken."""

    owed = (Owed(every_rank, per_update),)

    values: dict[str, str]
    """Knob -> value as text, or all values where objects differ, with ` | ` between them."""


class SourceTensor(TensorRecord, frozen=True, kw_only=True, tag="load/source"):
    """One tensor of the source checkpoint, or of a manifest that `golden --record` wrote."""

    copy_of: str = ""
    """Tensor that it repeats under a second name, as a layer that predicts further tokens does; empty for others."""


class PlacedTensor(TensorRecord, frozen=True, kw_only=True):
    """A tensor of one trainer rank."""

    coordinate: str
    """Mesh coordinate of the rank, such as "tp=0 pp=1 ep=0 etp=0 cp=0 dp=0"."""


class ExpectedShard(PlacedTensor, frozen=True, kw_only=True, tag="load/expected"):
    """Tensor that a rank must hold by the independent layout, cut from the source checkpoint."""

    owed = (Owed(every_rank, at_load),)


class ShardRecord(PlacedTensor, frozen=True, kw_only=True):
    """One live parameter, or one buffer that checkpoints hold, of one trainer rank."""

    replica: str
    """Key that all copies of one shard share."""


class LoadedShard(ShardRecord, frozen=True, kw_only=True, tag="load/shard"):
    """A live shard right after the load."""

    owed = (Owed(every_rank, at_load),)


class AdapterShard(ShardRecord, frozen=True, kw_only=True, tag="load/adapter-shard"):
    """A live shard of an adapter before any step."""

    owed = (Owed(every_rank, once),)


class AdapterSpread(Record, frozen=True, kw_only=True, tag="load/adapter-spread"):
    """Size of the initial values of an adapter's matrix, joined from all ranks."""

    shape: tuple[Count, Count]
    deviation: Real
    """Root of the mean square."""
