"""What the parent tells the ranks of a run; JSON there and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from verifier.mesh import Mesh

LEARNING_RATE = 1e-3
"""Of the first training step."""
CLIP_GRAD = 1.0
"""Greatest L2 norm of the gradient of a step."""
RATES: dict[str, float] = {
    "learning_rate": LEARNING_RATE,
    "least_learning_rate": LEARNING_RATE / 2,
    "weight_decay": 0.1,
    "greatest_weight_decay": 0.2,
    "num_steps": 4,
}
"""How a step's rates change: each step has its own, so that a scheduler that misses a step or takes two shows. Every
matrix decays, so that a vector that decays and a matrix that does not show."""
NO_DECAY = {"weight_decay": 0.0, "greatest_weight_decay": 0.0}
"""Instead, of an adapter."""
AT_TEMPERATURE = "scored at a temperature"
"""Name of the pass that scores at `TEMPERATURE`."""
AT_LENGTH = "scored at length"
"""Name of the pass that scores one long sequence."""
TEMPERATURE = 1.25
"""What logits are divided by in a training step, and in one more pass that scores. Not 1, so that one forgotten shows;
above 1, so that rounding is not magnified."""
SAMPLING_TEMPERATURE = 2.0
"""Of one more set of samples at version 0: at 1, a temperature that nobody applies does not show, nor log-probabilities
of the logits before it."""
GREEDY = 0.0
"""A temperature at which the likeliest token is taken."""
ENTROPY_WEIGHT = 0.1
"""Of each token's entropy in the loss."""
DRIFT_WEIGHT = 0.05
"""Of half the squared distance between a token's log-probability and the engine's in the loss."""
CHUNK_BYTES = 64 << 20
"""Greatest buffer of a transfer from host to host."""
GPU_CHUNK_BYTES = 1 << 30
"""Greatest buffer between GPUs: what is said about a chunk takes less time than its bytes (docs/adr/0010)."""
LEAST_CHUNK_BYTES = 64 << 10
CHUNKS = 8
"""A model of less than this many full buffers is sent in smaller ones, so that every transfer has several chunks."""


MICRO_BATCH = 3
"""Sequences that are trained on together at the most, so few that every rank adds up the gradients of several
micro-batches, and that one of them gets fewer."""
TRUNCATED, UNANSWERED, BRIEF, CURT = 4, 5, 6, 7
"""Of eight sequences, those that are not like the others: one whose answer was cut off, so that none of it is trained
on; one without an answer; one whose answer is of one token; one whose prompt is."""
OUTLIER_NATS = -24.0
"""What the engine is said to have reported less for one token in eleven: so far off that a clamp of the ratio shows."""


def turns(index: int, num_tokens: int) -> tuple[int, list[bool]]:
    """How a training sequence is divided: length of its prompt, and for each later token whether it was sampled.

    A quarter is prompt, but for the sequences named above; of the response every fifth token is tool output, so that
    masks have holes as real ones do.
    """
    quarter = max(1, num_tokens // 4)
    prompt = {UNANSWERED: num_tokens, BRIEF: num_tokens - 1, CURT: 1}.get(index % 8, quarter)
    return prompt, [at % 5 != 4 for at in range(num_tokens - prompt)]


def trained(index: int, num_tokens: int) -> list[bool]:
    """For each token after the prompt whether it is in the loss: sampled, and not left out.

    Every seventh token is left out as well, so that a mask that is not taken, or made anew of who wrote what, shows.
    """
    _, sampled = turns(index, num_tokens)
    return [drawn and at % 7 != 3 and index % 8 != TRUNCATED for at, drawn in enumerate(sampled)]


def made_up_reward(index: int) -> float:
    """Reward of a training sequence: another one for each, of either sign and once zero, and of more bits than bf16."""
    return (index + 1) / 3 * (1, -1, 1, 0, 1, -1, 1, -1)[index % 8]


def made_up_logprobs(index: int, num_tokens: int) -> list[float]:
    """What the engine is said to have reported for a training sequence's response, nats: another one for each token."""
    return [-(index + 1) - at / 100 + OUTLIER_NATS * (at % 11 == 10) for at in range(num_tokens)]


def made_up_versions(index: int, num_tokens: int, version: int) -> list[int]:
    """The weights that are said to have sampled each token of a response: it went on while they changed."""
    return [version + (index + at // 6) % 3 for at in range(num_tokens)]


def chunk_bytes_for(total_bytes: int, transport: str) -> int:
    """Buffer size for a model of so many bytes."""
    most = CHUNK_BYTES if transport == "gloo" else GPU_CHUNK_BYTES
    return min(most, max(LEAST_CHUNK_BYTES, total_bytes // CHUNKS))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run of the trainer's side, of golden or of a round trip."""

    checkpoint: str
    mesh: Mesh
    dtype: str
    tier: str
    trace: str
    """Directory of the trace, which the parent has created."""
    work: str
    """Directory for what the run hands on and need not keep: live shards, exported checkpoints."""
    sequences: Sequence[Sequence[int]] = ()
    """Token ids that trainer, engine and oracle score."""
    long: Sequence[int] = ()
    """Token ids that trainer and oracle score at version 0, more than an engine has room for."""
    prompts: Sequence[Sequence[int]] = ()
    """Prompts to sample from, longer than a block of the prefix cache."""
    batches: Sequence[Sequence[Sequence[int]]] = ()
    """Token ids of each training step, one batch per cycle."""
    update: str = "step"
    """"step": a real optimizer step; "noise": every tensor moved by seeded noise."""
    gradients: bool = False
    """Hand each step's gradients to the oracle."""
    chunk_bytes: int = CHUNK_BYTES
    engine_socket: str | None = None
    """None where no engine takes part."""
    engine_ranks: int = 0
    transport: str = "gloo"
    """How weights reach the engine: "gloo", "nccl" or "ipc"."""
    num_gpus: int = 0
    """How many of the host's GPUs the ranks take, in turn; 0: all."""
    sleep_level: int = 0
    """At which level the engine sleeps while the trainer steps; 0: it stays awake."""
    lora_rank: int = 0
    """Above 0: train an adapter of this rank on a frozen base."""
    restore_first: bool = False
    """Send version 0 to the engine before anything else, so that it holds what this run expects of it."""
    saves: bool = False
    """Have megatron-bridge write the last export to files too, and see what a reader finds there."""
    source_from_manifest: bool = False
    """What the export is compared with is recorded elsewhere, so the source is not digested."""
    fixes: Sequence[str] = ()
    """Ids of the upstream fixes that the ranks install."""
    seed: int = 0
    deadline_s: float = 180.0

    @property
    def cycles(self) -> int:
        """Updates, each followed by a sync."""
        return len(self.batches)

    @property
    def at_length(self) -> list[Sequence[int]]:
        """The long sequence, and a short one packed with it: who loses one of a batch's shall not be left with none."""
        return [self.long, self.sequences[0]]

    def to_json(self) -> dict[str, Any]:
        """Inverse of `from_json`."""
        return {**asdict(self), "mesh": self.mesh.to_dict()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunSpec:
        """Rebuild a spec that was sent as JSON."""
        known = {item.name for item in fields(cls)}
        return cls(**{**{k: v for k, v in record.items() if k in known}, "mesh": Mesh(**record["mesh"])})
