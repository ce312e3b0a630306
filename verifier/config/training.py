"""Config of `verifier train`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from verifier.config.cluster import RayOptions
from verifier.config.commands import RunConfig, next_trace, seed_knob, timeout_knob
from verifier.config.grpo import LOSSES, GrpoOptions
from verifier.config.lora import ENGINE_RANKS, LoraOptions
from verifier.config.megatron import MegatronOptions
from verifier.config.sampling import SamplingOptions
from verifier.knob import Knobs, group, knob

SCHEDULES = ("constant", "linear", "cosine")
AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant")
FIRST_RUN = Path("runs")
GENERATED = ("tiny", "wide")
"""Prefixes of models with random weights."""
WITHOUT_ORACLE = ("moe_aux_loss", "moe_z_loss", "moe_bias_update_rate")
"""Options of Megatron that change loss or weights in a way that the oracle does not compute."""
DEFAULT_COUNT = 8
"""Rollouts of a micro-batch where none of the knobs says how it is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(Knobs):
    """Examples, or recorded rollouts, that steps train on."""

    source: str = knob(
        "`arithmetic`, `calculator`, `reasoning-gym:TASK`, `verifiers:TASKSET`, a JSONL or Parquet file, or a folder.",
        "arithmetic",
    )
    options: tuple[str, ...] = knob("Options NAME=VALUE of a task of reasoning-gym or a task set of verifiers.", ())
    held_out: str | None = knob("File or folder of held-out examples; by default a split of the source.", None)
    split: str = knob("Split of a folder to train on.", "train")
    held_out_split: str | None = knob(
        "Split of a folder to evaluate on; by default the first there is of held-out, validation, test.", None
    )
    prompt_key: str | None = knob("Column of the prompt; several are joined as `instruction+input`.", "prompt")
    messages_key: str | None = knob("Column of the conversation.", "messages")
    response_key: str | None = knob("Column of the response to learn.", "response")
    answer_key: str | None = knob("Column of the gold answer, or a path such as `reward_model.ground_truth`.", "answer")
    id_key: str | None = knob("Column of the row's unique name.", "id")
    apply_chat_template: bool = knob("Make a user's message of a prompt, and an assistant's of its response.", False)
    chat_template: Path | None = knob("Jinja file in the place of the checkpoint's chat template.", None)
    chat_template_kwargs: tuple[str, ...] = knob(
        "Arguments of the chat template, each as name=value, such as enable_thinking=false.", ()
    )
    num_examples: int | None = knob("Examples to train on; by default all.", None, least=1)
    batch_size: int = knob("Examples of a step.", 32, least=1)
    rollouts: Path | None = knob("Folder of recorded rollouts, a JSONL file a step, 2 before 10.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(Knobs):
    """Division of a step's batch over passes; no division changes the step."""

    place = "batch."

    micro_batch_size: int | None = knob(
        "Rollouts of a micro-batch, at most; by default 8, or by tokens.", None, least=1
    )
    max_tokens: int | None = knob(
        "Tokens of a micro-batch, padding included, at most; in place of a count.", None, least=1, unit="tokens"
    )

    def _contradictions(self) -> dict[str, object]:
        both = self.micro_batch_size is not None and self.max_tokens is not None
        sentence = (
            "{batch.micro_batch_size} and {batch.max_tokens}: a micro-batch is cut by one of the two, leave the other "
            "out"
        )
        return {sentence: both}

    @property
    def count(self) -> int:
        """Greatest number of rollouts of a micro-batch that is cut by count."""
        return DEFAULT_COUNT if self.micro_batch_size is None else self.micro_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions(Knobs):
    """Adam and the schedule of its rates."""

    place = "optimizer."

    learning_rate: float = knob(
        "Learning rate after the warm-up; by default 1e-6 in GRPO, 1e-5 in SFT, 1e-3 of random weights.", math.nan,
        derived=True, least=0,
    )  # fmt: skip
    least_learning_rate: float = knob("Learning rate at the last step.", 0.0, least=0)
    schedule: str = knob("Course of the learning rate after the warm-up.", "constant", choices=SCHEDULES)
    warmup_steps: int = knob("Steps in which the learning rate rises, by equal amounts.", 0, least=0)
    weight_decay: float = knob("Decoupled weight decay of matrices.", 0.0, least=0)
    clip_grad: float = knob("Greatest L2 norm of a gradient; 0 does not clip.", 1.0, least=0)
    beta_1: float = knob("Decay of Adam's first moment.", 0.9, least=0, below=1)
    beta_2: float = knob("Decay of Adam's second moment.", 0.95, least=0, below=1)
    epsilon: float = knob("Summand of Adam's denominator.", 1e-8, least=0)

    def _contradictions(self) -> dict[str, object]:
        return {
            "{optimizer.least_learning_rate}, above optimizer.learning_rate, {=optimizer.learning_rate}: make it "
            "smaller": self.least_learning_rate > self.learning_rate,
            "{optimizer.least_learning_rate} and {optimizer.schedule}, which never falls: choose linear or cosine": (
                self.schedule == "constant" and self.least_learning_rate
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions(Knobs):
    """Held-out evaluation: the share of problems whose answer greedy decoding gives, token by token."""

    place = "evaluation."

    every: int = knob(
        "Steps between two evaluations; above 1 there is one before step 1 too; 0: at the end alone.", 0, least=0
    )
    num_problems: int | None = knob("Held-out problems; 0: none; by default those there are, up to 512.", None, least=0)
    stop_above: float = knob("Accuracy at which training ends early; above 1: never.", 2.0)

    def _contradictions(self) -> dict[str, object]:
        sentence = (
            "{evaluation.stop_above} and {evaluation.every}, which evaluates at the end alone: give evaluation.every, "
            "or leave it out"
        )
        return {sentence: not self.every and self.stop_above <= 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions(Knobs):
    """Checkpoints, from which the same command continues a run that was stopped."""

    every: int = knob("Steps between two checkpoints; 0: at the end alone.", 100, least=0)
    keep: int = knob("Checkpoints that are kept: the last ones.", 2, least=1)
    asynchronous: bool = knob("Write checkpoints in a process of their own while training goes on.", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions(Knobs):
    """Judging of steps while the run trains."""

    steps: bool = knob("Judge every stage of every step.", False, flag="--verify/--no-verify")
    every: int | None = knob(
        "Steps between two that transformers computes too; 0: none; by default 1, 2, 4, 8, ... where there is room.",
        None, least=0,
    )  # fmt: skip
    rollouts: int | None = knob(
        "Rollouts of each optimizer step there that it computes; by default all, or as many as have 16,384 tokens.",
        None, least=1,
    )  # fmt: skip
    keep: int | None = knob(
        "Steps whose traces stay: the last ones that hold, beside suspected and violated ones; by default all.",
        None, least=0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(Knobs):
    """Steps of which torch.profiler leaves a chrome trace."""

    steps: tuple[str, ...] = knob("Steps that torch.profiler looks at.", ())
    ranks: tuple[str, ...] = knob("Ranks that it looks at.", ("0",))

    def _contradictions(self) -> dict[str, object]:
        wrong = {
            f"profile.{name} has `{text}`, it must be a whole number of at least {least}": (
                not text.isascii() or not text.isdigit() or int(text) < least
            )
            for name, least in (("steps", 1), ("ranks", 0))
            for text in getattr(self, name)
        }
        nothing = "profile.steps is given and profile.ranks is empty: nothing would be profiled"
        return wrong | {nothing: self.steps and not self.ranks}

    def covers(self, step: int, rank: int) -> bool:
        """Tell whether a step is profiled on a rank."""
        return step in map(int, self.steps) and rank in map(int, self.ranks)


def default_learning_rate(model: str, algorithm: str, *, adapters: bool) -> float:
    """Learning rate of a run that names none.

    Source:
        Random weights learn at 1e-3. A pretrained model forgets at that rate: verl, TRL and SkyRL take 1e-6 for GRPO
        and 1e-5 for fine-tuning, and ten times as much for adapters.
    """
    if model.partition(":")[0] in GENERATED:
        return 1e-3
    return (1e-6 if algorithm == "grpo" else 1e-5) * (10 if adapters else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(RunConfig):
    """Config of `verifier train`."""

    timeout_s: float = timeout_knob("Deadline of the whole run.", 86_400.0)
    algorithm: str = knob("Supervised fine-tuning, or GRPO.", "sft", choices=("sft", "grpo"))
    first: Path | None = knob(
        "Config of a run to train before this one, in its folder `first`; this run begins with its weights.", None,
    )  # fmt: skip
    steps: int = knob("Optimizer steps.", 100, flag="--steps", least=1)
    seed: int = seed_knob("Seed of data and order.")
    run: Path = knob(
        "Folder of the run; by default the next free runs/train-NNNN.",
        factory=lambda: next_trace("train", FIRST_RUN), flag="--run", metavar="DIR", last=True,
    )  # fmt: skip
    plugins: tuple[str, ...] = knob("Modules that register losses, advantages and rewards, on every rank.", ())
    wandb: bool = knob("Write metrics as an offline run of wandb too, in the run's folder `wandb`.", False)
    data: DataOptions = group(DataOptions)
    batch: BatchOptions = group(BatchOptions)
    aggregation: str = knob("Mean of the tokens' losses.", "token_mean", choices=AGGREGATIONS)
    aggregation_constant: float | None = knob(
        "Tokens that the aggregation `constant` divides a sequence by.", None, above=0
    )
    grpo: GrpoOptions = group(GrpoOptions)
    engine: SamplingOptions = group(SamplingOptions)
    transport: str | None = knob(
        "Of weights to the engine; by default chosen by the free GPUs.", None, flag="--transport",
        choices=("gloo", "nccl", "ipc"),
    )  # fmt: skip
    optimizer: OptimizerOptions = group(OptimizerOptions)
    megatron: MegatronOptions = group(MegatronOptions)
    lora: LoraOptions = group(LoraOptions)
    evaluation: EvaluationOptions = group(EvaluationOptions)
    checkpoint: CheckpointOptions = group(CheckpointOptions)
    verify: VerifyOptions = group(VerifyOptions)
    profile: ProfileOptions = group(ProfileOptions)
    ray: RayOptions = group(RayOptions)

    def _fill(self) -> None:
        RunConfig._fill(self)
        if math.isnan(self.optimizer.learning_rate):
            rate = default_learning_rate(self.model, self.algorithm, adapters=bool(self.lora.rank))
            object.__setattr__(self, "optimizer", replace(self.optimizer, learning_rate=rate))

    def _contradictions(self) -> dict[str, object]:
        modes = self._of_modes() if self.algorithm == "grpo" else {}
        shared = self._of_algorithm() | self._of_adapters() | self._of_engine()
        return shared | modes | self._of_fsdp() | self._of_course()

    @property
    def samples(self) -> bool:
        """True if rollouts come from an engine."""
        return self.algorithm == "grpo" and self.data.rollouts is None

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the run."""
        return self.steps * (self.grpo.updates if self.algorithm == "grpo" else 1)

    @property
    def beyond_oracle(self) -> tuple[str, str]:
        """Reason for which transformers can compute no step of these knobs, and another remedy; empty if it can."""
        options, rounded = self.megatron, self.dtype != "float32"
        names = (*WITHOUT_ORACLE, *(("mtp_loss_scaling_factor",) if rounded else ()))
        asked = {name: f"{value:g}" for name in names if (value := getattr(options, name))}
        if rounded and not options.grad_reduce_in_fp32:
            asked["grad_reduce_in_fp32"] = "false"
        for name, text in asked.items():
            return f"megatron.{name} is {text}, which the oracle does not compute", ", or leave it out"
        if self.algorithm == "grpo" and self.grpo.loss not in LOSSES:
            return f"grpo.loss is {self.grpo.loss}, whose formula the oracle does not know", ", or choose another loss"
        return "", ""

    def _of_algorithm(self) -> dict[str, object]:
        constant, replays = self.aggregation_constant, self.grpo.replay_routes
        return {
            "aggregation=constant divides by aggregation_constant, no other aggregation does: give both or neither": (
                (self.aggregation == "constant") != (constant is not None)
            ),
            "{data.rollouts} and {algorithm}, which trains on text: leave data.rollouts out, or give algorithm=grpo": (
                self.algorithm == "sft" and self.data.rollouts is not None
            ),
            "{grpo.replay_routes} and {algorithm}, whose texts no engine routed: leave it out": (
                replays and self.algorithm == "sft"
            ),
            "{grpo.replay_routes} and {engine.kind}, which reports no routes: use vllm": (
                replays and self.engine.kind != "vllm" and self.data.rollouts is None
            ),
            "{grpo.replay_routes} and megatron.recompute_modules has moe, whose routers would run again without "
            "routes: use megatron.recompute=full, or leave moe out": replays
            and "moe" in self.megatron.recompute_modules,
        }

    def _of_adapters(self) -> dict[str, object]:
        """An engine that does not take the adapters."""
        rank, engine = self.lora.engine_rank(samples=self.samples), self.engine
        asked = {"kind": engine.kind != "vllm", "pp": engine.pp > 1, "sleep_level": engine.sleep_level}
        asked["quantization"] = engine.quantization is not None
        plain = {
            f"{{engine.{name}}} and {{lora.sync}}, which takes an awake vLLM with weights as they are: leave it out, "
            "or choose lora.sync=merged": rank and is_asked
            for name, is_asked in asked.items()
        }
        ranks = ", ".join(map(str, ENGINE_RANKS))
        return {
            "{engine.lora_rank}, which is a knob of `verifier roundtrip`: give lora.rank": engine.lora_rank,
            "{lora.sync} and the run samples from no engine: leave it out": (
                self.lora.sync == "merged" and not self.samples
            ),
            f"{{lora.rank}} and {{lora.sync}}: vLLM takes adapters of rank {ranks}; choose one, or lora.sync=merged": (
                rank and rank not in ENGINE_RANKS
            ),
            **plain,
        }

    def _of_engine(self) -> dict[str, object]:
        """Several engines where nothing deals to them, and a cache that no engine has."""
        several, cache = self.engine.replicas > 1, self.engine.kv_cache_gib is not None
        return {
            "{engine.replicas} and the run samples from no engine: leave it out": several and not self.samples,
            "{engine.replicas} and {lora.sync}, which is handed to one engine: use lora.sync=merged": (
                several and self.lora.engine_rank(samples=True)
            ),
            "{engine.replicas} and {data.batch_size}: an engine would have no prompt, use fewer": (
                several and self.engine.replicas > self.data.batch_size
            ),
            "{engine.kv_cache_gib} and the run samples from no engine: leave it out": cache and not self.samples,
            "{engine.kv_cache_gib} and {engine.kind}, which keeps no cache: leave it out": (
                cache and self.engine.kind != "vllm"
            ),
        }

    def _of_modes(self) -> dict[str, object]:
        """A mode of GRPO that the source of its rollouts does not have."""
        mode, recorded = self.grpo.mode, self.data.rollouts is not None
        in_flight = mode == "inflight"
        return {
            "{grpo.mode} and {data.rollouts}: recorded rollouts are not sampled while the run trains, leave one of the "
            "two out": mode != "sync" and recorded,
            "{grpo.mode} and {grpo.max_staleness}: every rollout is of the very weights that it trains, leave "
            "grpo.max_staleness out, or use grpo.mode=async": (
                mode == "sync" and self.grpo.max_staleness and not recorded
            ),
            "{grpo.max_sampling_rounds} and {data.rollouts}: recorded groups are not sampled anew, leave one of the "
            "two out": self.grpo.max_sampling_rounds > 1 and recorded,
            "{grpo.environment} and {data.rollouts}: recorded rollouts hold their turns already, leave one of the two "
            "out": self.grpo.has_turns and recorded,
            "{grpo.mode} and {engine.sleep_level}: the engine samples while the trainer steps, use "
            "engine.sleep_level=0": mode != "sync" and self.engine.sleep_level,
            "{grpo.mode} and {engine.pp}: vLLM 0.21 schedules a batch ahead for each stage, which an update reaches "
            "too late, use grpo.mode=async": in_flight and self.engine.pp > 1,
            "{grpo.replay_routes} and {engine.pp}: vLLM 0.21 reports no routes of several stages, leave one of the two "
            "out": self.grpo.replay_routes and self.engine.pp > 1,
            "{grpo.mode} and {ray.use}: no run has tried requests of a cluster's engine that go on between calls, use "
            "grpo.mode=async": in_flight and self.ray.use,
            "{grpo.mode} and {lora.sync}: requests that run keep the adapter that they began with, use "
            "lora.sync=merged, or grpo.mode=async": in_flight and self.lora.engine_rank(samples=True),
            "{grpo.mode} and {grpo.replay_routes}: tokens before an update are routed by the old weights and, "
            "recomputed, by the new, use grpo.mode=async, or leave grpo.replay_routes out": (
                in_flight and self.grpo.replay_routes
            ),
            "{grpo.keep_kv_cache} and {engine.kind}, which recomputes keys and values for every token: leave it out, "
            "or use engine.kind=vllm": self.grpo.keep_kv_cache and self.engine.kind == "hf",
        }

    def _of_fsdp(self) -> dict[str, object]:
        """Parts that a run with Megatron-FSDP does not have."""
        reasons = {
            "mesh.pp": (self.mesh.pp > 1, "stages of a pipeline are not sharded so far"),
            "mesh.ep": ((self.mesh.ep or 1) > 1, "experts have shards of their own, which are not judged so far"),
            "lora.rank": (self.lora.rank, "adapters are not sharded so far"),
            "grpo.kl_weight": (self.grpo.kl_weight, "the reference would be held whole on every rank"),
            "grpo.replay_routes": (self.grpo.replay_routes, "experts are not sharded so far"),
            "engine.sleep_level": (self.engine.sleep_level, "its shards do not leave the GPU so far"),
        }
        return {
            f"{{megatron.use_fsdp}} and {{{key}}}: {reason}, leave one of the two out": self.megatron.use_fsdp and asked
            for key, (asked, reason) in reasons.items()
        }

    def _of_course(self) -> dict[str, object]:
        """A batch that its data or the ranks do not fit; an evaluation or a profile that never comes."""
        data, mesh, size = self.data, self.mesh, self.data.batch_size
        shown, groups = "{data.batch_size}", self.algorithm == "grpo"
        if groups:
            shown += ", {grpo.group_size} and {grpo.mini_batches}"
            size = size * self.grpo.group_size // self.grpo.mini_batches
        least = mesh.dp * (mesh.pp if mesh.vpp > 1 else 1)
        stages = ", {mesh.pp} and {mesh.vpp}" if least > mesh.dp else ""
        sampled = data.rollouts is None  # the files of recorded ones say how many there are
        steps = {
            f"profile.steps has {step} and {{steps}}: the run has no such step": int(step) > self.steps
            for step in self.profile.steps
        }
        ranks = {
            f"profile.ranks has {rank} and the mesh has {mesh.world_size} ranks, 0 to {mesh.world_size - 1}: there is "
            "no such rank": int(rank) >= mesh.world_size
            for rank in self.profile.ranks
        }
        return {
            "{data.batch_size}, more than data.num_examples, {=data.num_examples}": (
                data.num_examples is not None and data.batch_size > data.num_examples
            ),
            "{megatron.grad_reduce_in_fp32} and {dtype}: gradients have the weights' type, so there is no other to "
            "reduce in; give dtype=bf16": not self.megatron.grad_reduce_in_fp32 and self.dtype == "float32",
            f"{shown}: a mini-batch needs a group of its own": (
                sampled and groups and data.batch_size < self.grpo.mini_batches
            ),
            f"{shown}, {{mesh.dp}}{stages}: an optimizer step has {size} rollouts, and the ranks take {least} at a "
            "time: make the batch larger, or the mesh smaller": sampled and size < least,
            "data.held_out is given and {evaluation.num_problems}: nothing would be evaluated, leave one out": (
                data.held_out is not None and self.evaluation.num_problems == 0
            ),
            "{verify.every} and {verify.steps}: give --verify": self.verify.every and not self.verify.steps,
            "{verify.rollouts} and {verify.steps}: give --verify": self.verify.rollouts and not self.verify.steps,
            **steps,
            **ranks,
        }
