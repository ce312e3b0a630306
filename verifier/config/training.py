"""Config of `verifier train`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from verifier.config.cluster import RayOptions
from verifier.config.commands import RunConfig, next_trace
from verifier.config.fsdp import refuse_fsdp
from verifier.config.grpo import GrpoOptions
from verifier.config.lora import LoraOptions
from verifier.config.megatron import MegatronOptions
from verifier.config.profile import ProfileOptions
from verifier.config.sampling import SamplingOptions
from verifier.errors import UsageError
from verifier.knob import check, group, knob

SCHEDULES = ("constant", "linear", "cosine")
AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant")
FIRST_RUN = Path("runs")
GENERATED = ("tiny", "wide")
"""Prefixes of models with random weights."""
DEFAULT_COUNT = 8
"""Rollouts of a micro-batch where none of the knobs says how it is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Examples, or recorded rollouts, that steps train on.

    Raises:
        UsageError: a value that its knob does not allow.
    """

    source: str = knob(
        "`arithmetic`, `calculator`, `reasoning-gym:TASK`, `verifiers:TASKSET`, a JSONL or Parquet file, or a folder.",
        "arithmetic",
    )  # fmt: skip
    options: tuple[str, ...] = knob("Options NAME=VALUE of a task of reasoning-gym or a task set of verifiers.", ())
    held_out: str | None = knob("File or folder of held-out examples; by default a split of the source.", None)
    split: str = knob("Split of a folder to train on.", "train")
    held_out_split: str | None = knob(
        "Split of a folder to evaluate on; by default the first there is of held-out, validation, test.", None
    )  # fmt: skip
    prompt_key: str | None = knob("Column of the prompt; several are joined as `instruction+input`.", "prompt")
    messages_key: str | None = knob("Column of the conversation.", "messages")
    response_key: str | None = knob("Column of the response to learn.", "response")
    answer_key: str | None = knob("Column of the gold answer, or a path such as `reward_model.ground_truth`.", "answer")
    id_key: str | None = knob("Column of the row's unique name.", "id")
    apply_chat_template: bool = knob("Make a user's message of a prompt, and an assistant's of its response.", False)
    chat_template: Path | None = knob("Jinja file in the place of the checkpoint's chat template.", None)
    chat_template_kwargs: tuple[str, ...] = knob(
        "Arguments of the chat template, each as name=value, such as enable_thinking=false.", ()
    )  # fmt: skip
    num_examples: int | None = knob("Examples to train on; by default all.", None, least=1)
    batch_size: int = knob("Examples of a step.", 32, least=1)
    rollouts: Path | None = knob("Folder of recorded rollouts, a JSONL file a step, 2 before 10.", None)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Division of a step's batch over passes; no division changes the step.

    Raises:
        UsageError: a value that its knob does not allow.
    """

    micro_batch_size: int | None = knob(
        "Rollouts of a micro-batch, at most; by default 8, or by tokens.", None, least=1
    )  # fmt: skip
    max_tokens: int | None = knob(
        "Tokens of a micro-batch, padding included, at most; in place of a count.", None, least=1, unit="tokens"
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        if self.micro_batch_size is not None and self.max_tokens is not None:
            raise UsageError(
                f"batch.micro_batch_size is {self.micro_batch_size} and batch.max_tokens is {self.max_tokens:,}: a "
                "micro-batch is cut by one of the two, leave the other out"
            )

    @property
    def count(self) -> int:
        """Greatest number of rollouts of a micro-batch that is cut by count."""
        return DEFAULT_COUNT if self.micro_batch_size is None else self.micro_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """Adam and the schedule of its rates.

    Raises:
        UsageError: a value that its knob does not allow, or knobs that contradict each other; names the keys.
    """

    learning_rate: float = knob(
        "Learning rate after the warm-up; by default 1e-6 in GRPO, 1e-5 in SFT, 1e-3 of random weights.", math.nan,
        derived=True,
    )  # fmt: skip
    least_learning_rate: float = knob("Learning rate at the last step.", 0.0)
    schedule: str = knob("Course of the learning rate after the warm-up.", "constant", choices=SCHEDULES)
    warmup_steps: int = knob("Steps in which the learning rate rises, by equal amounts.", 0, least=0)
    weight_decay: float = knob("Decoupled weight decay of matrices.", 0.0)
    clip_grad: float = knob("Greatest L2 norm of a gradient; 0 does not clip.", 1.0)
    beta_1: float = knob("Decay of Adam's first moment.", 0.9)
    beta_2: float = knob("Decay of Adam's second moment.", 0.95)
    epsilon: float = knob("Summand of Adam's denominator.", 1e-8)

    def __post_init__(self) -> None:
        check(self)
        for name in ("learning_rate", "least_learning_rate", "weight_decay", "clip_grad", "epsilon"):
            value = getattr(self, name)
            is_left = name == "learning_rate" and math.isnan(value)  # to the run's config, which knows the model
            if not is_left and not 0 <= value < math.inf:
                raise UsageError(f"optimizer.{name} is {value:g}, it must be at least 0 and finite")
        for name in ("beta_1", "beta_2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise UsageError(f"optimizer.{name} is {value:g}, it must be at least 0 and below 1")
        if self.least_learning_rate > self.learning_rate:
            raise UsageError(
                f"optimizer.least_learning_rate is {self.least_learning_rate:g}, above optimizer.learning_rate, "
                f"{self.learning_rate:g}: make it smaller"
            )
        if self.schedule == "constant" and self.least_learning_rate:
            raise UsageError(
                f"optimizer.least_learning_rate is {self.least_learning_rate:g} and optimizer.schedule is constant, "
                "which never falls: choose linear or cosine"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Held-out evaluation: the share of problems whose answer greedy decoding gives, token by token.

    Raises:
        UsageError: a value that its knob does not allow, or knobs that contradict each other; names the keys.
    """

    every: int = knob(
        "Steps between two evaluations; above 1 there is one before step 1 too; 0: at the end alone.", 0, least=0
    )
    num_problems: int | None = knob("Held-out problems; 0: none; by default those there are, up to 512.", None, least=0)
    stop_above: float = knob("Accuracy at which training ends early; above 1: never.", 2.0)

    def __post_init__(self) -> None:
        check(self)
        if not self.every and self.stop_above <= 1:
            raise UsageError(
                f"evaluation.stop_above is {self.stop_above:g} and evaluation.every is 0, which evaluates at the end "
                "alone: give evaluation.every, or leave it out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints, from which the same command continues a run that was stopped.

    Raises:
        UsageError: a value that its knob does not allow.
    """

    every: int = knob("Steps between two checkpoints; 0: at the end alone.", 100, least=0)
    keep: int = knob("Checkpoints that are kept: the last ones.", 2, least=1)
    asynchronous: bool = knob("Write checkpoints in a process of their own while training goes on.", False)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Judging of steps while the run trains.

    Raises:
        UsageError: a value that its knob does not allow.
    """

    steps: bool = knob("Judge every stage of every step.", False, flag="--verify/--no-verify")
    every: int | None = knob(
        "Steps between two that transformers computes too; 0: none; by default 1, 2, 4, 8, ... of a small model.", None,
        least=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


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

    timeout_s: float = knob(
        "Deadline of the whole run.", 86_400.0, flag="--timeout", metavar="SECONDS", unit="seconds", last=True
    )  # fmt: skip
    algorithm: str = knob("Supervised fine-tuning, or GRPO.", "sft", choices=("sft", "grpo"))
    first: Path | None = knob(
        "Config of a run to train before this one, in its folder `first`; this run begins with its weights.", None,
    )  # fmt: skip
    steps: int = knob("Optimizer steps.", 100, flag="--steps", least=1)
    seed: int = knob("Seed of data and order.", 1, flag="--seed")
    run: Path = knob(
        "Folder of the run; by default the next free runs/train-NNNN.",
        factory=lambda: next_trace("train", FIRST_RUN), flag="--run", metavar="DIR", last=True,
    )  # fmt: skip
    plugins: tuple[str, ...] = knob("Modules that register losses, advantages and rewards, on every rank.", ())
    wandb: bool = knob("Write metrics as an offline run of wandb too, in the run's folder `wandb`.", False)
    data: DataOptions = group(DataOptions)
    batch: BatchOptions = group(BatchOptions)
    aggregation: str = knob("Mean of the tokens' losses.", "token_mean", choices=AGGREGATIONS)
    aggregation_constant: float | None = knob("Tokens that the aggregation `constant` divides a sequence by.", None)
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

    def __post_init__(self) -> None:
        if math.isnan(self.optimizer.learning_rate):
            rate = default_learning_rate(self.model, self.algorithm, adapters=bool(self.lora.rank))
            object.__setattr__(self, "optimizer", replace(self.optimizer, learning_rate=rate))
        RunConfig.__post_init__(self)

    def _refuse_contradictions(self) -> None:
        if (self.aggregation == "constant") != (self.aggregation_constant is not None):
            raise UsageError(
                "aggregation=constant divides by aggregation_constant, no other aggregation does: give both or neither"
            )
        if self.aggregation_constant is not None and not 0 < self.aggregation_constant < math.inf:
            raise UsageError(
                f"aggregation_constant is {self.aggregation_constant:g}, it must be above 0 and finite: it divides"
            )
        if self.algorithm == "sft" and self.data.rollouts is not None:
            raise UsageError(
                f"data.rollouts is {self.data.rollouts} and algorithm is sft, which trains on text: "
                "leave data.rollouts out, or give algorithm=grpo"
            )
        self.lora.refuse_engine(self.engine, samples=self.samples)
        self._refuse_replay()
        self._refuse_replicas()
        self.engine.refuse_cache(samples=self.samples)
        if self.algorithm == "grpo":
            self._refuse_modes()
        refuse_fsdp(self)
        self._refuse_sizes()
        self._refuse_course()

    @property
    def samples(self) -> bool:
        """True if rollouts come from an engine."""
        return self.algorithm == "grpo" and self.data.rollouts is None

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the run."""
        return self.steps * (self.grpo.updates if self.algorithm == "grpo" else 1)

    def _refuse_replicas(self) -> None:
        """Refuse several engines where nothing deals to them."""
        if self.engine.replicas == 1:
            return
        given = f"engine.replicas is {self.engine.replicas}"
        if not self.samples:
            raise UsageError(f"{given} and the run samples from no engine: leave it out")
        if self.ray.use:
            raise UsageError(f"{given} and ray.use is true: an engine of a cluster is alone so far, use 1")
        if self.lora.engine_rank(samples=True):
            raise UsageError(f"{given} and lora.sync is adapter, which is handed to one engine: use lora.sync=merged")
        if self.engine.replicas > self.data.batch_size:
            raise UsageError(
                f"{given} and data.batch_size is {self.data.batch_size}: an engine would have no prompt, use fewer"
            )

    def _refuse_replay(self) -> None:
        """Refuse routes to replay that nothing reports, or that routers would be given in vain."""
        if not self.grpo.replay_routes:
            return
        given = "grpo.replay_routes is true"
        if self.algorithm == "sft":
            raise UsageError(f"{given} and algorithm is sft, whose texts no engine routed: leave it out")
        if self.engine.kind != "vllm" and self.data.rollouts is None:
            raise UsageError(f"{given} and engine.kind is {self.engine.kind}, which reports no routes: use vllm")
        if "moe" in self.megatron.recompute_modules:
            raise UsageError(
                f"{given} and megatron.recompute_modules has moe, whose routers would run again without routes: use "
                "megatron.recompute=full, or leave moe out"
            )

    def _refuse_modes(self) -> None:
        """Refuse a mode of GRPO that the source of its rollouts does not have."""
        mode, staleness = self.grpo.mode, self.grpo.max_staleness
        if mode != "sync" and self.data.rollouts is not None:
            raise UsageError(
                f"grpo.mode is {mode} and data.rollouts is {self.data.rollouts}: recorded rollouts are not sampled "
                "while the run trains, leave one of the two out"
            )
        if mode == "sync" and staleness and self.data.rollouts is None:
            raise UsageError(
                f"grpo.mode is sync and grpo.max_staleness is {staleness}: every rollout is of the very weights that "
                "it trains, leave grpo.max_staleness out, or use grpo.mode=async"
            )
        if self.grpo.max_sampling_rounds > 1 and self.data.rollouts is not None:
            raise UsageError(
                f"grpo.max_sampling_rounds is {self.grpo.max_sampling_rounds} and data.rollouts is "
                f"{self.data.rollouts}: recorded groups are not sampled anew, leave one of the two out"
            )
        if self.grpo.has_turns and self.data.rollouts is not None:
            raise UsageError(
                f"grpo.environment is {self.grpo.environment} and data.rollouts is {self.data.rollouts}: recorded "
                "rollouts hold their turns already, leave one of the two out"
            )
        if mode != "sync" and self.engine.sleep_level:
            raise UsageError(
                f"grpo.mode is {mode} and engine.sleep_level is {self.engine.sleep_level}: the engine samples while "
                "the trainer steps, use engine.sleep_level=0"
            )
        if mode == "inflight" and self.ray.use:
            raise UsageError(
                "grpo.mode is inflight and ray.use is true: the engine of a cluster does not hold requests between two "
                "calls so far, use grpo.mode=async"
            )
        if mode == "inflight" and self.lora.engine_rank(samples=True):
            raise UsageError(
                "grpo.mode is inflight and lora.sync is adapter: requests that run keep the adapter that they began "
                "with, use lora.sync=merged, or grpo.mode=async"
            )
        if mode == "inflight" and self.grpo.replay_routes:
            raise UsageError(
                "grpo.mode is inflight and grpo.replay_routes is true: tokens before an update are routed by the old "
                "weights and, recomputed, by the new, use grpo.mode=async, or leave grpo.replay_routes out"
            )
        if self.grpo.keep_kv_cache and self.engine.kind == "hf":
            raise UsageError(
                "grpo.keep_kv_cache is true and engine.kind is hf, which recomputes keys and values for every token: "
                "leave it out, or use engine.kind=vllm"
            )

    def _refuse_sizes(self) -> None:
        """Refuse a batch that its data cannot fill, or that cannot fill the ranks."""
        size, data, mesh = self.data.batch_size, self.data, self.mesh
        if data.num_examples is not None and size > data.num_examples:
            raise UsageError(f"data.batch_size is {size}, more than data.num_examples, {data.num_examples}")
        if not self.megatron.grad_reduce_in_fp32 and self.dtype == "float32":
            raise UsageError(
                "megatron.grad_reduce_in_fp32 is false and dtype is fp32: gradients have the weights' type, so there "
                "is no other to reduce in; give dtype=bf16"
            )
        if data.rollouts is not None:
            return  # their files say how many there are
        least = mesh.dp * (mesh.pp if mesh.vpp > 1 else 1)
        shown = f"data.batch_size is {size}"
        if self.algorithm == "grpo":
            parts = self.grpo.mini_batches
            shown += f", grpo.group_size is {self.grpo.group_size} and grpo.mini_batches is {parts}"
            if size < parts:
                raise UsageError(f"{shown}: a mini-batch needs a group of its own")
            size = size * self.grpo.group_size // parts
        if size < least:
            stages = f", mesh.pp is {mesh.pp} and mesh.vpp is {mesh.vpp}" if least > mesh.dp else ""
            raise UsageError(
                f"{shown}, mesh.dp is {mesh.dp}{stages}: an optimizer step has {size} rollouts, "
                f"and the ranks take {least} at a time"
            )

    def _refuse_course(self) -> None:
        """Refuse an evaluation, a judgement or a profile that would never come."""
        if self.data.held_out is not None and self.evaluation.num_problems == 0:
            raise UsageError(
                "data.held_out is given and evaluation.num_problems is 0: nothing would be evaluated, leave one out"
            )
        if self.verify.every and not self.verify.steps:
            raise UsageError(f"verify.every is {self.verify.every} and verify.steps is false: give --verify")
        for step in self.profile.steps:
            if int(step) > self.steps:
                raise UsageError(f"profile.steps has {step} and steps is {self.steps}: the run has no such step")
        for rank in self.profile.ranks:
            if int(rank) >= self.mesh.world_size:
                raise UsageError(
                    f"profile.ranks has {rank} and the mesh has {self.mesh.world_size} ranks, 0 to "
                    f"{self.mesh.world_size - 1}: there is no such rank"
                )
        if self.verify.every and self.lora.rank and self.dtype != "float32":
            raise UsageError(
                f"verify.every is {self.verify.every}, lora.rank is {self.lora.rank} and dtype is bf16, in which "
                "the oracle does not compute gradients of adapters: set verify.every=0, or give dtype=fp32"
            )
