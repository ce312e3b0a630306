"""Config of `verifier train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verifier.config.commands import EngineOptions, RunConfig, next_trace
from verifier.config.grpo import GrpoOptions
from verifier.errors import UsageError
from verifier.knob import check, group, knob

SCHEDULES = ("constant", "linear", "cosine")
AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant")
FIRST_RUN = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Examples, or recorded rollouts, that steps train on.

    Raises:
        UsageError: a value that its knob does not allow.
    """

    source: str = knob("`arithmetic`, which is generated, a JSONL file, or a folder of `datasets`.", "arithmetic")
    held_out: str | None = knob("File or folder of held-out examples; arithmetic holds out its own.", None)
    num_examples: int | None = knob("Examples to train on; by default all.", None, least=1)
    batch_size: int = knob("Examples of a step.", 32, least=1)
    rollouts: Path | None = knob("Folder of recorded rollouts, a JSONL file a step.", None)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Division of a step's batch over passes; no division changes the step.

    Raises:
        UsageError: a value that its knob does not allow.
    """

    micro_batch_size: int = knob("Rollouts of a micro-batch, at most.", 8, least=1)
    max_tokens: int | None = knob(
        "Tokens of a micro-batch, padding included, at most; replaces batch.micro_batch_size.", None, least=1,
        unit="tokens",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """Adam and the schedule of its rates.

    Raises:
        UsageError: a value that its knob does not allow, or knobs that contradict each other; names the keys.
    """

    learning_rate: float = knob("Learning rate once the warm-up has ended.", 1e-3)
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
            if not 0 <= value < float("inf"):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Held-out evaluation: the share of problems whose answer greedy decoding gives, token by token.

    Raises:
        UsageError: a value that its knob does not allow.
    """

    every: int = knob("Steps between two evaluations; 0: at the end alone.", 0, least=0)
    num_problems: int = knob("Held-out problems; 0: none.", 512, least=0)
    stop_above: float = knob("Accuracy at which training ends early; above 1: never.", 2.0)

    def __post_init__(self) -> None:
        check(self)


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
    every: int = knob("Steps between two whose gradient transformers computes too; 0: none.", 0, least=0)

    def __post_init__(self) -> None:
        check(self)


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
    data: DataOptions = group(DataOptions)
    batch: BatchOptions = group(BatchOptions)
    aggregation: str = knob("Mean of the tokens' losses.", "token_mean", choices=AGGREGATIONS)
    aggregation_constant: float | None = knob("Tokens that the aggregation `constant` divides a sequence by.", None)
    grpo: GrpoOptions = group(GrpoOptions)
    engine: EngineOptions = group(EngineOptions)
    transport: str | None = knob(
        "Of weights to the engine; by default chosen by the free GPUs.", None, flag="--transport",
        choices=("gloo", "nccl", "ipc"),
    )  # fmt: skip
    optimizer: OptimizerOptions = group(OptimizerOptions)
    evaluation: EvaluationOptions = group(EvaluationOptions)
    checkpoint: CheckpointOptions = group(CheckpointOptions)
    verify: VerifyOptions = group(VerifyOptions)

    def _refuse_contradictions(self) -> None:
        if (self.aggregation == "constant") != (self.aggregation_constant is not None):
            raise UsageError(
                "aggregation=constant divides by aggregation_constant, no other aggregation does: give both or neither"
            )
