"""What an engine is: the requests it answers and the plain types it answers with. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from verifier.errors import UsageError
from verifier.model.families import num_experts_of
from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.wire import Address, Agreement, Receipt

KINDS = ("vllm", "hf")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine is started.

    Raises:
        UsageError: unknown kind or dtype, or a tensor-parallel size the kind does not have.
    """

    kind: str
    checkpoint: str
    """A checkpoint directory; its weights are loaded cold."""
    dtype: str = "float32"
    tp: int = 1
    max_model_len: int = 512
    """Longest sequence, in tokens, prompt and generated together."""
    seed: int = 0
    gpus: str = ""
    """The GPUs of its ranks, such as "2,3"; nothing leaves it to the engine."""
    cuda_graphs: bool = False
    """Capture CUDA graphs and replay them; otherwise eager."""
    sleep_mode: bool = False
    """Allocate so that the engine can sleep."""
    quantization: str | None = None
    """As vLLM spells it; applied to the weights as they are loaded."""
    lora_rank: int = 0
    """Greatest rank of the adapter that can be loaded; 0: none can."""
    fixes: tuple[str, ...] = ()
    """Ids of the upstream fixes that are installed in its processes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fixes", tuple(self.fixes))  # a list, where it came as JSON
        if self.kind not in KINDS:
            raise UsageError(f"there is no engine `{self.kind}`; choose one of {', '.join(KINDS)}")
        if self.dtype not in DTYPES:
            raise UsageError(f"the engine cannot run in {self.dtype}; choose one of {', '.join(DTYPES)}")
        if self.kind == "hf" and self.tp != 1:
            raise UsageError(f"--engine hf runs on one rank, so --engine-tp {self.tp} does not apply; leave it at 1")
        if self.tp not in (1, 2, 4, 8):
            raise UsageError(f"--engine-tp {self.tp} is not one of 1, 2, 4, 8")

    def to_json(self) -> dict[str, Any]:
        """Keyword arguments that rebuild this config."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """One thing an engine rank computes with, under the engine's own name."""

    name: str
    kind: str
    """ "parameter", "buffer", "view" (a buffer in a parameter's memory), or "derived": a packed copy, an attribute."""
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlice:
    """The part of one checkpoint tensor that an engine rank holds, read back from what it computes with.

    One checkpoint tensor may be held several times on one rank (a tied head, a packed copy beside the original).
    """

    name: str
    """Checkpoint spelling."""
    holder: str
    """The engine's own name of what it was read from."""
    dtype: str
    shape: tuple[int, ...]
    digest: str
    box: tuple[tuple[int, int], ...]
    """Per dim of the checkpoint tensor: [begin, end) of this rank's part."""
    quantized: bool = False
    """The engine rounded it together with its neighbours, so that its bits cannot be what was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisoned:
    """What the poison did to one held tensor."""

    name: str
    how: str
    """ "nan"; "nan, restored before the update" (no checkpoint carries it); or "left: " and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a request asks of a distribution besides its temperature; nothing, unless it says so."""

    top_k: int = 0
    """Only so many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this share together."""
    min_p: float = 0.0
    """Only tokens of this share of the likeliest one's probability."""
    repetition: float = 1.0
    """What logits of tokens that came before, prompt included, are divided by; those below 0 are multiplied by it."""
    presence: float = 0.0
    """Nats taken from a token that was sampled."""
    frequency: float = 0.0
    """Nats taken from it each time."""
    bias: Sequence[tuple[int, float]] = ()
    """Tokens, and nats added to their logits."""
    allowed: Sequence[int] = ()
    """The only tokens that may come; none: all."""
    least: int = 0
    """Tokens before which no stop token may come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How continuations are sampled: from the full vocabulary, unless shaped."""

    seed: int
    """Of the first continuation of the first prompt; every one has a generator of its own."""
    max_tokens: int
    n: int = 1
    """Continuations of each prompt."""
    stop: Sequence[int] = ()
    """Tokens that end a continuation, and belong to it."""
    temperature: float = 1.0
    """What logits are divided by; 0 takes the likeliest token."""
    shape: Shape = field(default_factory=Shape)
    seeded: bool = True
    """Otherwise the engine's own generator serves them all."""
    each: Sequence[Sampling] = ()
    """One for each prompt, instead of this one: requests that differ, side by side."""

    def of(self, index: int) -> Sampling:
        """What holds for one of the prompts; the seeds of its continuations begin where the one's before it end."""
        return self.each[index] if self.each else replace(self, seed=(self.seed + index) * self.n)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Sampling:
        """Inverse of `asdict`."""
        each = [cls.from_json(row) for row in record["each"]]
        return cls(**{**record, "each": each, "shape": Shape(**record["shape"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One generated continuation."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Nats, of each sampled token under the distribution that it was drawn from."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """All samples of one prompt."""

    prompt: tuple[int, ...]
    samples: tuple[Sample, ...] = field(default=())


class Engine(Protocol):
    """What every engine answers. Lists per engine rank are in rank order."""

    num_ranks: int

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Teacher-forced: per sequence, entry t is log p(token t+1 | tokens 0..t), float32 nats, length len-1."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        """Continuations of each prompt."""

    def state(self) -> list[list[HeldTensor]]:
        """Every parameter, buffer (persistent or not) and derived tensor of each rank."""

    def checkpoint_view(self) -> list[list[HeldSlice]]:
        """The same contents, mapped back to checkpoint names."""

    def poison(self) -> list[list[Poisoned]]:
        """Fill everything that computes with NaN."""

    def connect(self, address: Address) -> None:
        """Join the sender's transfer group; blocks until all members are there."""

    def begin_update(self, plan: ChunkPlan) -> list[Agreement]:
        """Agree on the plan with the sender and all ranks; if reached, make ready to receive."""

    def receive(self, chunk: int) -> list[Receipt]:
        """Receive and load one chunk of the agreed plan."""

    def finish_update(self) -> None:
        """Process what was loaded; the new weights are in use after it."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached keys and values; True when it was done."""

    def load_adapter(self, path: str) -> None:
        """Score and sample with this PEFT directory's adapter from now on; its place is poisoned first."""

    def sleep(self, level: int) -> None:
        """Give up the GPU's memory: at level 1 the weights are kept on the host, at level 2 they are dropped."""

    def wake_up(self, tag: str) -> None:
        """Take up the memory of "weights" or of "kv_cache" again; what it holds at level 2 is up to the engine."""

    def call(self, module: str, function: str, arguments: Sequence[Any]) -> list[Any]:
        """Run ``function(worker, *arguments)`` on each rank; the results must be JSON values."""

    def shutdown(self) -> None:
        """Leave the transfer group and free the model."""


def check_sequences(sequences: Sequence[Sequence[int]], *, vocab_size: int, max_len: int, least: int = 2) -> None:
    """Refuse token sequences that an engine would answer with a stack trace or, worse, with a number.

    Raises:
        UsageError: names the sequence and the token.
    """
    for index, tokens in enumerate(sequences):
        if not least <= len(tokens) <= max_len:
            raise UsageError(f"sequence {index} has {len(tokens)} tokens; the engine takes {least} to {max_len}")
        for position, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                raise UsageError(
                    f"sequence {index} has token {token} at position {position}, outside the vocabulary "
                    f"[0, {vocab_size})"
                )


def refuse_unsupported(config: Mapping[str, Any], *, on_cpu: bool, tp: int = 1) -> None:
    """Say at once what would otherwise fail a minute into vLLM's start.

    Args:
        config: the checkpoint's config.json.
        on_cpu: vLLM would run on its CPU kernels.
        tp: tensor parallel size of the engine.

    Raises:
        UsageError: vLLM has no CPU kernels for this architecture, or cannot share its heads out.
    """
    heads = config.get("num_attention_heads")
    if heads is not None and heads % tp:
        raise UsageError(f"--engine-tp {tp} does not divide the {heads} attention heads")
    if on_cpu and config.get("kv_lora_rank") is not None:
        raise UsageError("vLLM has no CPU kernels for multi-head latent attention; use --engine hf")
    if on_cpu and config.get("mamba_num_heads") is not None:
        raise UsageError("vLLM has no CPU kernels for state-space layers; use --engine hf")


def refuse_adapters(config: Mapping[str, Any]) -> None:
    """Refuse architectures whose adapters trainer and engine do not cut alike.

    Args:
        config: the checkpoint's config.json.

    Raises:
        UsageError: experts, latent attention, or layers without attention.
    """
    for what, found in (
        ("experts", num_experts_of(config)),
        ("latent attention", config.get("kv_lora_rank") is not None),
        ("state-space layers", config.get("hybrid_override_pattern") is not None),
    ):
        if found:
            raise UsageError(f"--engine-lora-rank takes dense models of plain attention, and this one has {what}")


def package_root() -> Path:
    """The directory that must be importable for this package to be."""
    return Path(__file__).resolve().parents[2]
