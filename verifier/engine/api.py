"""Interface of an engine: its requests, the plain types of its answers, and their way between processes. Torch-free."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from verifier.config import EngineOptions
from verifier.config_json import has_delta_nets, text_model
from verifier.core.seal import NO_SEAL
from verifier.errors import ContractError, InternalError, UsageError, VerifierError
from verifier.launch import failures
from verifier.launch.child import resolve
from verifier.model.families import num_experts_of
from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.wire import Address, Agreement, Receipt, TransferFailed

if TYPE_CHECKING:
    import torch

    from verifier.engine.sender import Delivery

DTYPES = ("float32", "bfloat16")
_CPU_TOKENS = 640
"""Greatest number of tokens of a forward pass on a CPU. A round trip scores more, so prompts are chunked. It samples
from fewer, because vLLM 0.21 cannot chunk a prompt on a CPU that a seeded request samples from."""
_GPU_TOKENS = 8192
"""Greatest number of tokens of a forward pass on a GPU, unless one sequence has more. vLLM runs a pass of that size at
its start, to see what memory it takes. Longer batches of prompts are chunked."""
NO_SEED = -1
"""Seed of a sample that was drawn by a generator which serves all requests, where nobody says of which seed that is;
else it is as much less than this as the generator's seed plus one: `NO_SEED - 1 - seed`."""
LEAST_KV_CACHE_BYTES = 128 << 20
"""Bytes of an engine rank's keys and values, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """Orders for an engine's processes: the options of the user, and what the runner adds to them."""

    checkpoint: str
    """Directory of the checkpoint that is loaded at the start."""
    dtype: str = "float32"
    max_model_len: int = 512
    """Greatest length of prompt and continuation together, in tokens."""
    max_num_seqs: int = 64
    """Greatest number of sequences that are sampled at a time."""
    max_batch_tokens: int = 0
    """Greatest number of tokens of a forward pass; 0 leaves it to the engine."""
    kv_cache_bytes: int = LEAST_KV_CACHE_BYTES
    """Bytes of keys and values on each rank."""
    kv_cache_share: float = 0.0
    """Share of what the weights leave of a GPU, which keys and values have where sequences at once need as much; 0:
    they have `kv_cache_bytes`."""
    gpus: str = ""
    """GPUs of the engine's ranks, such as "2,3"; empty lets the engine choose."""
    inflight: bool = False
    """Switch: weights may be updated while requests run, so that a step ends before the next is scheduled."""
    replica: int = 0
    """Number among the engines of a run, from 0."""
    fixes: tuple[str, ...] = ()
    """Ids of the upstream fixes that are installed in the engine's processes."""
    lora_targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    """Linears with room for an adapter, in Megatron's words."""
    routes: bool = False
    """Samples of a mixture carry the experts that their tokens were routed to; no prefix is cached."""

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        if self.routes and self.kind != "vllm":
            raise UsageError(f"engine.kind is {self.kind}, which reports no routes: use vllm")
        if self.dtype not in DTYPES:
            raise UsageError(f"the engine cannot run in {self.dtype}; choose one of {', '.join(DTYPES)}")
        if self.tp not in (1, 2, 4, 8):
            raise UsageError(f"--engine-tp {self.tp} is not one of 1, 2, 4, 8")

    def pass_tokens(self, *, cuda: bool) -> int | None:
        """Tokens of a forward pass of vLLM, at most; None leaves them to it."""
        if cuda:
            return min(self.max_batch_tokens, max(_GPU_TOKENS, self.max_model_len)) or None
        return max(self.max_batch_tokens or _CPU_TOKENS, self.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTensor:
    """One tensor that an engine rank computes with, under the engine's name."""

    name: str
    kind: str
    """ "parameter", "buffer", "view" (a buffer in a parameter's memory) or "derived" (a packed copy, an attribute)."""
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlice:
    """Part of one checkpoint tensor on one engine rank, read back from what the rank computes with.

    A rank may have several copies of one checkpoint tensor, such as a tied head or a packed copy beside the original.
    """

    name: str
    """Name in the checkpoint."""
    holder: str
    """Engine's name of the tensor that the part was read from; empty for no element, in layers of other stages."""
    dtype: str
    shape: tuple[int, ...]
    digest: str
    box: tuple[tuple[int, int], ...]
    """This rank's part of the checkpoint tensor: [begin, end) in each dim."""
    quantized: bool = False
    """True if the engine quantized it together with other tensors, so that its bits differ from those sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisoned:
    """Result of poisoning one stored tensor."""

    name: str
    how: str
    """ "nan"; "nan, restored before the update" (no checkpoint carries it); or "left", and ": " with the reason."""


class TransferWatch:
    """Told of a transfer under way. It only looks."""

    version: int
    """Version of the weights."""

    def poisoned(self, outcomes: Sequence[Sequence[Poisoned]]) -> None:
        """All that the engine ranks hold was overwritten, before the transfer."""

    def agreed(self, agreement: Agreement) -> None:
        """All members have said which plan they hold."""

    def drawn(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor was drawn from the stream and is going to be packed."""

    def delivered(self, delivery: Delivery) -> None:
        """Every engine rank has confirmed a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Changes of a request to the next token's distribution besides temperature; none by default."""

    top_k: int = 0
    """Number of likeliest tokens that are kept; 0 for all."""
    top_p: float = 1.0
    """Total probability of the likeliest tokens that are kept."""
    min_p: float = 0.0
    """Least probability of a kept token, as a fraction of the likeliest token's."""
    repetition: float = 1.0
    """Divisor of the positive logits of earlier tokens, prompt included, and factor of their negative logits."""
    presence: float = 0.0
    """Nats subtracted from the logits of sampled tokens."""
    frequency: float = 0.0
    """Nats subtracted for each time that a token was sampled."""
    bias: Sequence[tuple[int, float]] = ()
    """(token, nats added to its logit)."""
    allowed: Sequence[int] = ()
    """Tokens that may be sampled; empty for all."""
    least: int = 0
    """Number of tokens before which no stop token and no end of the model may be sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request; by default from the full vocabulary."""

    seed: int
    """Seed of the first continuation of the first prompt; every continuation has its own generator."""
    max_tokens: int
    """Greatest number of tokens of a continuation."""
    n: int = 1
    """Number of continuations of each prompt."""
    stop: Sequence[int] = ()
    """Tokens that end a continuation; they belong to it."""
    temperature: float = 1.0
    """Divisor of the logits; 0 takes the likeliest token."""
    shape: Shape = field(default_factory=Shape)
    seeded: bool = True
    """Switch: a seeded generator for each continuation; otherwise the engine's own serves all."""
    each: Sequence[Sampling] = ()
    """One set of parameters per prompt, which replace these; empty for these."""
    ignore_end: bool = False
    """The end token of the model's own configuration ends nothing; `stop` still does."""
    ends: Sequence[int] = ()
    """Ends of the model that are none of `stop`: an engine samples none before `Shape.least` tokens, unasked."""

    def of(self, index: int) -> Sampling:
        """Return the parameters of one prompt; no two continuations of a batch have one seed."""
        return self.each[index] if self.each else replace(self, seed=(self.seed + index) * self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled continuation."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution that it was drawn from, nats."""
    ended: str = ""
    """Why it ended, in the engine's words: "stop" by a stop token, "length" by a limit."""
    cached_tokens: int = 0
    """Number of prompt tokens whose keys and values came from the prefix cache."""
    common_tokens: int = -1
    """Most that a prefix cache can hold of the prompt, see `Asked.common`; -1 if nobody looked."""
    routes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """[prompt + continuation - 1, layers with routers, experts per token] experts of each token that the engine ran,
    which the last one is not; empty unless asked for."""
    routes_seal: int = NO_SEAL
    """Checksum of these (int32), as the engine's process took it."""
    updates: tuple[int, ...] = ()
    """Weight updates from the beginning of its batch to each token; empty where none can have come."""
    weights: tuple[tuple[int, int], ...] = ()
    """Versions of the weights that the engine's process held, in order, each with the number of tokens that it then
    sampled; empty of an engine that gets adapters, whose names `shaped` has."""
    seed: int = NO_SEED
    """Seed of its generator, as the engine's process gave it."""
    shaped: str = ""
    """Knobs of its request that change the next token's distribution, as the engine's process gave them: name=value of
    each that is not neutral, by name, after adapter=NAME of one with an adapter."""


class Engine(Protocol):
    """Requests that every engine answers, by default as one does that holds nothing but its weights.

    Answers per engine rank are in rank order. Arguments and answers of `call` and `call_driver` are JSON values.
    """

    config: EngineConfig
    library: str
    """Name of its library, for errors."""

    def num_ranks(self) -> int:
        """Return the number of engine ranks."""
        return self.config.ranks

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Score sequences: entry t of each is log p(token t+1 | tokens 0..t), float32 nats, length len-1."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Sample]]:
        """Sample continuations of each prompt."""

    def begin_batch(self, prompts: Sequence[Sequence[int]], sampling: Sampling, steps: int) -> None:
        """Begin to sample continuations, and take so many steps of all that have begun; updates come between."""

    def finish_batch(self) -> list[list[Sample]]:
        """Sample the batch that began first to its end, each token with the updates since then that came before it."""

    def state(self) -> list[list[EngineTensor]]:
        """Describe every parameter, buffer and derived tensor of each rank."""

    def checkpoint_view(self) -> list[list[EngineSlice]]:
        """Describe the same contents as parts of checkpoint tensors."""

    def poison(self) -> list[list[Poisoned]]:
        """Fill every stored tensor with NaN."""

    def connect(self, address: Address) -> None:
        """Join the sender's transfer group; blocks until all members have joined."""

    def begin_update(self, plan: ChunkPlan) -> list[Agreement]:
        """Agree on the plan with the sender and all ranks; if reached, prepare to receive."""

    def receive(self, chunk: int) -> list[Receipt]:
        """Receive and load one chunk of the agreed plan."""

    def finish_update(self, version: int) -> None:
        """Process the loaded weights; they are in use afterwards, and are of this version."""
        return

    def reset_prefix_cache(self, running: bool = False) -> bool:
        """Drop all cached keys and values; return whether it was done.

        Requests that run hold theirs, so that nothing is dropped, unless theirs are to be computed anew: `running`.
        """
        return True

    def load_adapter(self, path: str) -> None:
        """Use the adapter of a PEFT directory from now on; its memory is poisoned first."""
        raise ContractError(f"the engine of {self.library} takes no adapters")

    def sleep(self, level: int) -> None:
        """Free the GPU's memory: level 1 keeps the weights on the host, level 2 drops them."""
        raise ContractError(f"the engine of {self.library} does not sleep")

    def wake_up(self, tag: str) -> None:
        """Allocate the memory of "weights" or "kv_cache" again; its contents are undefined after level 2."""
        raise ContractError(f"the engine of {self.library} does not sleep")

    def call(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        """Return what ``function(worker, *arguments)`` returns on each rank; it is named "package.module:function"."""
        return [self.call_driver(function, arguments)]

    def call_driver(self, function: str, arguments: Sequence[Any]) -> Any:
        """Return what ``function(engine, *arguments)`` returns in the engine's own process, which asks the ranks."""
        return resolve(function)(self, *arguments)

    def shutdown(self) -> None:
        """Leave the transfer group and free the model."""


CARRIED = (
    VerifierError, RuntimeError, ValueError, LookupError, AttributeError, TypeError, AssertionError, OSError,
    ImportError,
)  # fmt: skip
"""Errors that upstream code raises at a request that it cannot serve: reported to the client, and survived."""
_MAX_CAUSE = 600


def weights_of(versions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Join the versions of each token as `Sample.weights` has them."""
    return tuple((version, len([*own])) for version, own in groupby(versions))


def reply_of(function: Callable[..., Any], /, **arguments: Any) -> dict[str, Any]:
    """Call a function, and return its result or its error as JSON values; see `value_of`."""
    try:
        return {"value": msgspec.to_builtins(function(**arguments), enc_hook=lambda number: number.item())}  # numpy's
    except CARRIED as error:
        traceback.print_exc()
        return {"error": failures.to_record(error)}


def value_of(
    reply: dict[str, Any], doing: str, otherwise: type[VerifierError] = InternalError, *, party: str = ""
) -> Any:
    """Return the result in another process's reply, or raise its error; one that is not ours becomes `otherwise`.

    A failure of the stack under test is raised as that of `party`, unless `otherwise` says what such a failure means.
    """
    if "error" in reply:
        record = dict(reply["error"])
        cause = " ".join(record["cause"].split())[:_MAX_CAUSE]
        if otherwise is not InternalError:
            record.pop("stack", None)
        known = failures.known_error(record, (TransferFailed, *failures.OURS), party=party)
        raise known or otherwise(f"{doing}: {cause}")
    return reply["value"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Token sequences that an engine takes."""

    vocab_size: int
    max_len: int
    """Greatest length of prompt and continuation together, in tokens."""

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], config: EngineConfig) -> Limits:
        """Return the limits of a checkpoint, by its config.json, in an engine."""
        return cls(int(text_model(checkpoint)["vocab_size"]), config.max_model_len)

    def requests(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Sampling]:
        """Return the sampling parameters of each prompt, once all are checked."""
        found = [sampling.of(index) for index in range(len(prompts))]
        self.check(prompts, least=1, spare=max((item.max_tokens for item in found), default=0))
        return found

    def check(self, sequences: Sequence[Sequence[int]], least: int = 2, spare: int = 0) -> None:
        """Refuse sequences of fewer tokens, or that leave too few to spare, and tokens outside of the vocabulary."""
        for index, tokens in enumerate(sequences):
            if not least <= len(tokens) <= self.max_len - spare:
                most = self.max_len - spare
                raise UsageError(f"sequence {index} has {len(tokens)} tokens; the engine takes {least} to {most}")
            for position, token in enumerate(tokens):
                if not 0 <= token < self.vocab_size:
                    raise UsageError(
                        f"sequence {index} has token {token} at position {position}, outside the vocabulary "
                        f"[0, {self.vocab_size})"
                    )


def refuse_unsupported(config: Mapping[str, Any], *, on_cpu: bool, tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Refuse a checkpoint, by its config.json, with which vLLM would fail a minute into its start.

    Raises:
        UsageError: vLLM has no class or no CPU kernels for it, or a parallel size does not divide what it has.
    """
    kind, config = config.get("model_type"), text_model(config)
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    if heads is not None and heads % tp:
        raise UsageError(f"--engine-tp {tp} does not divide the {heads} attention heads: use a size that does")
    if layers is not None and layers < pp:
        raise UsageError(f"--engine-pp is {pp} and this model has {layers} layers: use {layers} or fewer")
    if ep > 1 and not num_experts_of(config):
        raise UsageError(f"--engine-ep is {ep} and this model has no experts to divide: leave it out")
    if config.get("dual_chunk_attention_config"):
        raise UsageError(
            "vLLM has no kernels for dual chunk attention: use --engine hf, or leave `dual_chunk_attention_config` out "
            "of config.json, which changes no sequence within a chunk"
        )
    if on_cpu and config.get("kv_lora_rank") is not None:
        raise UsageError("vLLM has no CPU kernels for multi-head latent attention; use --engine hf")
    if on_cpu and config.get("mamba_num_heads") is not None:
        raise UsageError("vLLM has no CPU kernels for state-space layers; use --engine hf")
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        raise UsageError(f"vLLM has no class for a text model of Qwen3.5 alone (`{kind}`); use --engine hf")


def refuse_adapters(config: Mapping[str, Any], knob: str = "--engine-lora-rank") -> None:
    """Refuse a checkpoint, by its config.json, whose adapters trainer and engine divide differently; names the knob.

    Raises:
        UsageError: experts, latent attention, or layers without attention.
    """
    for what, found in (
        ("experts", num_experts_of(config)),
        ("latent attention", config.get("kv_lora_rank") is not None),
        ("state-space layers", config.get("hybrid_override_pattern") is not None),
        ("gated delta nets", has_delta_nets(config)),
    ):
        if found:
            raise UsageError(f"{knob} takes dense models of plain attention, and this one has {what}")
