"""Hooks of a training run: what controller and ranks tell an observer. The trainer knows of no other onlooker.

Every method of a class here does nothing, so that a run without an observer is a run with one of these. An observer
looks: it changes no weight, no batch and no order of random numbers. It may end the run by an error. Methods of a
`RankObserver` are called on all ranks, and may be collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.engine.api import TransferWatch

if TYPE_CHECKING:
    import torch

    from verifier.config.training import TrainConfig
    from verifier.data.examples import Example
    from verifier.data.recorded import RolloutRow
    from verifier.data.rollout import Rollout
    from verifier.engine.client import EngineClient
    from verifier.engine.sender import Running
    from verifier.export.live_weights import LiveWeights
    from verifier.megatron.optimizer_megatron import StepSettings
    from verifier.megatron.pack import PackedBatch
    from verifier.megatron.policy_loss_megatron import LossMeter
    from verifier.megatron.router_replay_megatron import RouterWatch
    from verifier.megatron.step_megatron import OnRows, OnShards, StepResult
    from verifier.megatron.written_megatron import Stepped
    from verifier.model.checkpoint import Checkpoint
    from verifier.model.provider_megatron import TrainerModel
    from verifier.plan.chunk_plan import ChunkPlan
    from verifier.platform import Tier
    from verifier.runs.model_under_test import ModelUnderTest
    from verifier.runs.resources import Deadline, Resources
    from verifier.trainer.ahead import AheadRollouts
    from verifier.trainer.batches import OptimizerUpdate, Score, ScoredRollouts, Values
    from verifier.trainer.checkpoint_folder import Call
    from verifier.trainer.engines import Revival
    from verifier.trainer.evaluation import Answered
    from verifier.trainer.merge_rounding import MergeGap
    from verifier.trainer.metrics import Metrics
    from verifier.trainer.run_data import RunData
    from verifier.trainer.run_folder import RunFolder
    from verifier.trainer.sampled_batch import SampledBatch
    from verifier.trainer.state_megatron import Facts
    from verifier.trainer.weight_sync_megatron import Adapters

Note = Mapping[str, Any]
"""Message of a controller's observer to those of the ranks, as JSON, which goes with a call."""
SomeRollouts = Callable[[Sequence[int], "OnShards"], tuple["StepResult", Mapping[str, Any]]]
"""(places of rollouts of an update, viewer of their micro-batches) -> their losses, weighted as there, and the rows of
the loss; reduced gradients are in the model's buffers."""
Stream = Iterator[tuple[str, "torch.Tensor"]]
"""Export stream: (checkpoint name, tensor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """Parts that one rank trains with."""

    config: TrainConfig
    tier: Tier
    rank: int
    trainer: TrainerModel
    optimizer: Any
    scheduler: Any
    settings: StepSettings
    source: Checkpoint
    """Checkpoint that the ranks were told to load."""
    whole: LiveWeights
    live: LiveWeights
    """Weights that are trained: all, or the matrices of adapters."""
    adapters: Adapters | None
    reference: Callable[[], Sequence[torch.Tensor]]
    """A frozen tensor for each of the live ones; none in a run without a reference."""
    state: Callable[[], Facts]
    """Digests of all that the rank holds. A collective."""
    knobs: Callable[[], Mapping[str, str]]
    """Knob -> value that the live objects hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step on one rank; `step`, `number` and `first` as `OptimizerUpdate` has them."""

    step: int
    number: int
    batch: str
    rollouts: Sequence[Rollout]
    first: bool
    last: bool
    note: Note | None

    @property
    def name(self) -> str:
        """Name of the update."""
        return f"update {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer of weights, or of an adapter, to the engines."""

    version: int
    note: Note | None
    client: EngineClient | None
    """Connection to the engines; rank 0's alone."""
    num_ranks: int
    plan: ChunkPlan | None = None
    """Plan by which weights travel; None for an adapter, which travels as a file."""
    running: Running = "none"
    """Requests of the engine meanwhile, and what becomes of their keys and values."""
    again: bool = False
    """The engine died in this transfer before."""
    first: bool = False
    """These weights sample the step of the note, and were not made by it."""


class UpdateObserver:
    """Told of one optimizer step."""

    keeps_rows = False
    """The loss keeps the rows that it saw."""

    def passes(self) -> contextlib.AbstractContextManager[object]:
        """Entered around forward and backward passes and the optimizer's step."""
        return contextlib.nullcontext()

    def before_passes(self, compute: SomeRollouts) -> None:
        """Have gradients of some of the rollouts computed by themselves, which change nothing."""

    def on_batch(self, shards: list[PackedBatch]) -> Callable[[], None] | None:
        """Packed micro-batches of this rank are going to be used; see `step_megatron.OnShards`."""

    def on_gradients(self) -> None:
        """Gradients are reduced, and the optimizer has not stepped."""

    def on_optimizer_step(self, result: StepResult, meter: LossMeter, metrics: Mapping[str, float]) -> None:
        """Take what the step made: its result, rows of the loss if `keeps_rows`, and metrics of all ranks."""


class TransferObserver(TransferWatch, contextlib.AbstractContextManager["TransferObserver"]):
    """Told of one transfer, which is its body."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __exit__(self, *_: object) -> None:
        pass

    def exported(self, stream: Stream) -> Stream:
        """The export stream, looked at as it passes."""
        return stream

    def on_merge(self, name: str, gap: MergeGap) -> None:
        """A matrix was exported that has an adapter; rank 0 alone."""

    def on_adapter(self, path: Path, adapter: Mapping[str, torch.Tensor]) -> None:
        """An adapter was exported, and rank 0 has written it to a folder."""

    def on_sent(self, refused: str) -> None:
        """The engines hold the weights, or say why they refused them. A collective."""

    def on_lost(self) -> None:
        """An engine died: the transfer will be made again. After the body."""


class RankObserver:
    """Told of what one rank of the trainer does."""

    def on_build(self, parts: RankParts) -> None:
        """Model and optimizer are new, with the weights of the model's checkpoint."""

    def on_load(self, resume: Path | None, *, same_mesh: bool) -> None:
        """The rank is ready to train: from the model's checkpoint, or from one of the run, which was loaded over it.

        `same_mesh` says that the mesh of this run has saved that one.
        """

    def on_checkpoint(self, optimizer_steps: int) -> Sequence[Stepped]:
        """A checkpoint begins; return elements that its files must have."""
        return ()

    def on_scores(self, which: str, batch: str, rollouts: Sequence[Rollout]) -> OnRows | None:
        """A mini-batch is going to be scored by the weights as they are, or by the reference; return a viewer."""

    def on_routes(self, batch: str, during: str, watch: RouterWatch) -> None:
        """Routers have chosen the experts of a mini-batch's routes in a pass."""

    def on_update(self, update: Update) -> UpdateObserver:
        """An optimizer step begins."""
        return UpdateObserver()

    def on_connect(self, client: EngineClient | None, *, sleeps: bool) -> None:
        """Engines are there that were sent nothing yet; `client`, rank 0's alone, is connected to them.

        They sleep between transfers if it `sleeps`. An EngineGone says that one died meanwhile.
        """

    def on_transfer(self, transfer: Transfer) -> TransferObserver:
        """A transfer to the engines begins."""
        return TransferObserver(transfer.version)

    def on_offload(self) -> None:
        """The rank's state is going to leave the GPU."""

    def on_onload(self) -> None:
        """The rank's state is back on the GPU."""

    def before_export(self, version: int, note: Note | None) -> None:
        """The weights are going to be written as a Hugging Face checkpoint."""

    def on_export(self, version: int, note: Note | None, folder: Path, adapter: Path) -> None:
        """They are written, and so is the adapter, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Parts of a run, as its controller has them when its steps begin."""

    config: TrainConfig
    model: ModelUnderTest
    folder: RunFolder
    data: RunData | None
    """Examples and tokenizer; None for recorded rollouts."""
    call: Call
    score: Score
    progress: Callable[[str], None]
    metrics: Metrics
    ahead: AheadRollouts | None
    """Sampler that is a step ahead; None where rollouts are of the step's own weights."""
    engines: Revival | None
    """Engines that may be started again; None where none sample, or their death ends the run."""
    whole_answers: bool
    """The end token ends no answer."""
    done: int
    """Steps that were taken before."""
    updates: int
    """Optimizer steps that were taken before."""
    has_loss: bool
    """The last of them took an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """Examples of a step of fine-tuning."""

    step: int
    examples: Sequence[Example]
    update: OptimizerUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch:
    """Rollouts of a step and what became of them; lists have an entry a rollout."""

    step: int
    rows: Sequence[RolloutRow]
    reward: str
    """Name of the reward; empty where it was not recorded."""
    scored: ScoredRollouts
    parts: Sequence[Sequence[int]]
    files: Sequence[Path]
    penalties: Sequence[float]
    """Numbers by which the rewards were lowered."""
    advantages: Sequence[float]
    reasons: Sequence[str]
    """Reason for which a rollout has left the loss; empty where it stays."""
    columns: Mapping[str, Values]
    kept: Sequence[Rollout]
    """The rollouts with the masks of what stays in the loss."""
    updates: Sequence[OptimizerUpdate]


class Observer:
    """Told of what the controller of a run does."""

    ranks = ""
    """See `WorkerSpec.observer`."""
    judges = False
    """Samples are judged, so that a log-probability which is no number ends the run as a violation."""

    def during(
        self, config: TrainConfig, model: ModelUnderTest, folder: RunFolder
    ) -> contextlib.AbstractContextManager[object]:
        """Entered around all of the run but the checks of its config."""
        return contextlib.nullcontext()

    def on_config(self, config: TrainConfig, model: ModelUnderTest) -> None:
        """The run is going to start; refuse what the observer has no means to look at."""

    def on_finished(self, folder: RunFolder, steps: int) -> None:
        """The folder holds the whole run of so many steps already."""

    def on_model(
        self, model: ModelUnderTest, resources: Resources, until: Deadline, progress: Callable[[str], None]
    ) -> None:
        """The model's layout is known, and neither ranks nor engines have started."""

    def on_resume(self, step: int) -> None:
        """The ranks load the checkpoint of a step."""

    def on_start(self, run: RunParts) -> None:
        """The steps begin."""

    def on_step(self, step: int, *, sends_first: bool) -> None:
        """A step begins, from 1 on; `sends_first`: the engines are going to get the weights that sample it."""

    def note(self) -> Note | None:
        """Message that the calls of the step carry to the ranks' observers."""
        return None

    def blaming(self, until: int) -> contextlib.AbstractContextManager[object]:
        """Entered around work that a step, up to one, may be to blame for: its error goes first."""
        return contextlib.nullcontext()

    def on_rollouts(self, step: int, batch: SampledBatch, sent: Sequence[int]) -> None:
        """The engines have sampled a step, and the reward has scored it; `sent` are the versions that they got."""

    def on_scores(self, step: int, scored: ScoredRollouts, parts: Sequence[Sequence[int]], file: Path) -> None:
        """The ranks have scored the rollouts of a step, a mini-batch each of `parts`, the first from a file."""

    def on_batch(self, batch: TextBatch | PolicyBatch) -> None:
        """The batch of a step is made."""

    def on_updates(self, step: int, updates: Sequence[OptimizerUpdate]) -> None:
        """The updates of a step are going to be taken; none where no token is in its loss."""

    def before_training(self, step: int) -> None:
        """Wait for what has to be known before the ranks step."""

    def on_sync(self, version: int) -> None:
        """The engines hold a version that a note went with."""

    def on_step_end(self, step: int, reports: Sequence[Mapping[str, float]]) -> None:
        """A step is taken, and the engines hold its weights; each update has its report."""

    def on_evaluation(self, version: int, answered: Answered | None) -> None:
        """The weights were evaluated: by answers of the engines, or by the ranks on held-out responses."""

    def before_checkpoint(self, step: int) -> None:
        """Wait for what has to be known before a checkpoint is begun."""

    def on_checkpoint(self, step: int, found: Sequence[Any]) -> None:
        """A checkpoint is whole; each rank has read back some of it."""

    def before_export(self, step: int) -> Note | None:
        """The weights of the last step are going to be exported; return a note for the ranks."""
        return None

    def on_export(self, step: int, source: Path, exported: Path) -> None:
        """They are in a folder, with the files beside the weights of the source."""


SILENT = Observer()
"""An observer that looks at nothing."""
