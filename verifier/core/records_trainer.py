"""Records of a training run's steps: data, batch, optimizer, step, state."""

from __future__ import annotations

from typing import Literal

import msgspec

from verifier.core.owed import Owed, after_another, anyone, every_rank, expert_rank, once, per_step, per_update
from verifier.core.record import ArrayRecord, Count, Lengths, Real, Record, TensorRecord


class DataOrder(Record, frozen=True, kw_only=True, tag="data/order"):
    """Examples that one round of sampling asks, in order."""

    owed = (Owed(anyone, per_step),)

    step: Count
    """Number of the step, from 1."""
    examples: tuple[str, ...]
    """Id of each example."""
    prompts: tuple[str, ...]
    """Text of each prompt."""
    answers: tuple[str | None, ...] = ()
    """Gold answer of each example."""
    rendered: tuple[str, ...] = ()
    """Text of all that an engine is given for each prompt, as the tokenizer's template writes it."""
    round: Count = 0
    """Round of sampling within the step: prompts of a later one replace others."""


class RolloutTexts(Record, frozen=True, kw_only=True, tag="data/texts"):
    """Texts of a batch's rollouts, decoded from the tokens that are trained; lists have an entry a rollout."""

    owed = (Owed(anyone, per_step),)

    begin: str
    """Text of the tokens that the tokenizer puts before a whole text, such as `<bos>`."""
    ids: tuple[str, ...]
    groups: tuple[str, ...]
    """Step, round of sampling unless it is the first, place in it and id of the example, as "3.1/0/example"."""
    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    """Last turn that was sampled, without its end token."""


class PreviousStep(Record, frozen=True, kw_only=True, tag="train/previous"):
    """The step before the one of the trace, or the last one of a run; the version is that of the weights it left."""

    owed = (Owed(anyone, after_another),)
    is_side = False

    updated: bool
    """It took an update, so that weights were sent."""
    here: bool
    """The process that recorded the trace took it."""


class TrainedText(Record, frozen=True, kw_only=True, tag="data/trained"):
    """Texts of a step's examples, conversations among them; lists have an entry an example."""

    owed = (Owed(anyone, per_step),)

    ids: tuple[str, ...]
    responses: tuple[str, ...]
    """Text that the data set has after the prompt; empty for conversations."""
    texts: tuple[str, ...]
    """Text of the tokens in the loss, special ones included."""
    end: str
    """Text of the end token."""
    conversations: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 - msgspec copies it
    """Text of the assistant in each conversation, turn by turn, by id."""
    opening: str = ""
    """Text that the chat template may put between an assistant's header and what it says."""
    closing: str = ""
    """Text that it puts after what an assistant says, up to the last special token of the turn."""


class LossColumns(ArrayRecord, frozen=True, kw_only=True, tag="advantage/columns"):
    """Inputs of the loss per token, made once for the whole batch. Arrays [N] float64 over all tokens, by name."""

    owed = (Owed(anyone, per_update),)

    aggregation: str
    """Mean that the weights make: "token_mean", "sequence_mean", "prompt_mean" or "constant"."""
    constant: float = 1.0
    """Tokens of a sequence that the aggregation "constant" divides by."""
    dtype: str = "float64"
    """Dtype in which the weights were computed."""
    ids: tuple[str, ...]
    groups: tuple[str, ...]
    lengths: Lengths


class OptimizerSettings(Record, frozen=True, kw_only=True, tag="train/optimizer"):
    """Adam's settings and the schedule of its rates, by the number of the step from 1 on."""

    owed = (Owed(anyone, per_step),)

    schedule: Literal["constant", "linear", "cosine"]
    learning_rate: float
    """Learning rate once the warm-up has ended."""
    least_learning_rate: float
    """Learning rate at `decay_steps`, and after; a constant schedule has none."""
    warmup_steps: Count
    """Steps in which the rate rises by equal amounts, from the first on."""
    decay_steps: Count
    """Step at which the rate is the least."""
    weight_decay: float
    clip_grad: float
    """Greatest L2 norm of a step's gradient; 0 does not clip."""
    beta_1: float
    beta_2: float
    epsilon: float
    behind: Count = 0
    """Steps that the schedule is behind: 1 where the first one has the rate of step 0, as in transformers."""
    vectors_decay: bool | None = False
    """Parameters of one dimension decay as others do; None where nobody says."""


class ParameterGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of parameters of one rank's optimizer, as it was in a step."""

    learning_rate: Real
    weight_decay: Real
    vectors: Count
    """Parameters of one dimension: norms and biases."""
    others: Count
    """Parameters of more dimensions, and those whose dimensions are not known."""


class TrainerStep(Record, frozen=True, kw_only=True, tag="train/done"):
    """Report of one rank's optimizer step."""

    owed = (Owed(every_rank, per_update),)

    step: Count
    """Number of the optimizer step, from 1."""
    loss: Real
    """Sum of weight * loss over all tokens, nats."""
    num_tokens: Count
    """Tokens in the loss, over all ranks."""
    grad_norm: Real
    """L2 norm that the optimizer clipped by."""
    learning_rate: Real
    """Greatest rate of any group of parameters in this step, as the optimizer held it."""
    weight_decay: Real
    """Greatest weight decay of any group in this step."""
    groups: tuple[ParameterGroup, ...] = ()
    """Groups with parameters on this rank."""
    optimizer_steps: Count
    """Steps that the optimizer counts after this one."""
    scheduler_steps: Count | None
    """Steps that the scheduler counts after this one; None where it is not known."""
    scheduler_ahead: int = 1
    """Steps that the scheduler is to count beyond those of the optimizer."""


class SampledMaster(msgspec.Struct, frozen=True, kw_only=True):
    """Elements of one tensor around an update, on the rank whose optimizer has them."""

    name: str
    begin: Count
    """Index of the first element in the flattened tensor of the rank's model."""
    elements: Count
    dtype: Literal["float32", "bfloat16"]
    """Dtype of the weight, to which its master is rounded."""
    learning_rate: Real
    weight_decay: Real
    step: Count
    """Number of the step that bias is corrected by, from 1."""
    left: Real | None = None
    """Greatest magnitude of the gradient before the first pass of the step; None where nobody looked."""


class AdamSample(ArrayRecord, frozen=True, kw_only=True, tag="train/adam"):
    """Some elements of some tensors of one rank around an update by Adam, and its settings.

    Arrays of all tensors one after another, in the types that the optimizer has but float32 for bfloat16:
    ``master_before``, ``exp_avg_before`` and ``exp_avg_sq_before``; ``gradient`` as it was reduced, before it is
    clipped; ``master``, ``exp_avg``, ``exp_avg_sq`` and ``weight`` after the update.
    """

    owed = (Owed(every_rank, per_update),)

    coordinate: str
    """Mesh coordinate of the rank."""
    tensors: tuple[SampledMaster, ...]
    clip_grad: float
    """Greatest L2 norm of the gradient; 0 where it is not clipped, or was before it was recorded."""
    grad_norm: Real
    """L2 norm that the optimizer clips by."""
    beta_1: float
    beta_2: float
    epsilon: float
    decoupled: bool = True
    """The decay is no part of the gradient."""
    remembered: Count = 0
    """Tensors of which the rank knows what the update before left."""
    moved: tuple[str, ...] = ()
    """Remembered tensors whose master, moments or weight are others now."""
    strays: tuple[str, ...] = ()
    """Tensors whose weights before the update were not the masters, rounded; of all before the first of a process."""
    frozen: tuple[str, ...] = ()
    """Parameters of the rank that no update moves, but for the base of an adapter."""
    begun_with: Real | None = None
    """Greatest moment of any master before the first update of a run; None of later ones."""


class RouterBalance(ArrayRecord, frozen=True, kw_only=True, tag="train/balance"):
    """Score biases of one rank's routers in one optimizer step, and the tokens that they gave to each expert.

    Arrays, each [layers, experts]: ``before`` and ``after`` float32, the biases around the step; ``tokens`` int64, rows
    of the rank's micro-batches, padding included, that routers gave to the expert in the forward passes of the step;
    ``left`` float32, the biases as the update before left them, where this process has taken one.
    """

    owed = (Owed(expert_rank, per_update),)

    coordinate: str
    """Mesh coordinate of the rank."""
    layers: tuple[Count, ...]
    """Global layer of each row, from 0."""
    rate: float
    """Change of a bias in a step that the config asks for; 0 leaves it as it is."""


class AdapterScale(msgspec.Struct, frozen=True, kw_only=True):
    """Factor by which one adapter multiplied the output of its second matrix, in one pass."""

    name: str
    scale: Real
    """Factor by least squares."""
    gap: Real
    """Greatest distance of an element of the adapter's output from what was asked for."""
    greatest: Real
    """Greatest magnitude of what was asked for."""
    altered: Real = 0.0
    """Greatest distance of an element that its first matrix was given from what the adapter was."""
    dtype: Literal["float32", "bfloat16"]


class AdapterScales(Record, frozen=True, kw_only=True, tag="logprob/adapter-scales"):
    """Factors of the adapters of one rank, in the first pass of one optimizer step."""

    owed = (Owed(every_rank, per_update),)

    coordinate: str
    """Mesh coordinate of the rank."""
    asked: float
    """Alpha over rank, as the config asks."""
    adapters: tuple[AdapterScale, ...]


class RouterGradients(ArrayRecord, frozen=True, kw_only=True, tag="loss/routers"):
    """Gradients that the own losses of one rank's routers add to those of their logits in one optimizer step.

    Lists have an entry for each backward pass of a router. Arrays: ``counts`` [passes, experts] int64, rows that have
    the expert among those of their greatest scores; of some rows of each pass, one after another, [rows, experts]:
    ``logits``; ``found`` float64, the gradient by the logits less what comes through the experts' weights; ``size``
    [rows] float64, the greatest magnitude that was added up and taken off there.
    """

    owed = (Owed(expert_rank, per_update),)

    coordinate: str
    """Mesh coordinate of the rank."""
    layers: tuple[Count, ...]
    """Global layer, from 0."""
    numbers: tuple[Count, ...]
    """Number of the pass among those of its layer, from 0: the micro-batch."""
    rows: tuple[Count, ...]
    """Rows of the pass, padding included."""
    kept: Lengths
    """Rows of it that are in the arrays."""
    experts_of_row: Count
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    """Function that makes scores of logits."""
    dtype: Literal["float32", "float64", "bfloat16"]
    """Type of the logits."""


class StateRecord(TensorRecord, frozen=True, kw_only=True):
    """One tensor, counter or random state of a run: "weight/...", "optimizer/...", "scheduler/...", "rng/..."."""

    coordinate: str
    """Mesh coordinate of the rank; empty for the run's own state."""


class SavedState(StateRecord, frozen=True, kw_only=True, tag="checkpoint/saved"):
    """State that a rank held when the checkpoint was saved."""

    owed = (Owed(every_rank, once),)


class LoadedState(StateRecord, frozen=True, kw_only=True, tag="checkpoint/loaded"):
    """State that a rank holds after the checkpoint was loaded, before the next step."""

    owed = (Owed(every_rank, once),)


class LoadedElements(ArrayRecord, frozen=True, kw_only=True, tag="checkpoint/elements"):
    """Elements of one part of a rank's state after a load on another mesh, by tensors of the checkpoint.

    Arrays, int64, of all tensors one after another: ``index`` in the flattened tensor; ``loaded`` the bits of float32
    there, or a count; ``saved`` those that any rank saved, -1 where none did.
    """

    coordinate: str
    """Mesh coordinate of the rank."""
    tensors: tuple[str, ...]
    counts: Lengths
    """Elements of each tensor."""
    saved_elements: Count
    """Elements of this part that all ranks saved together."""


class WrittenTensors(ArrayRecord, frozen=True, kw_only=True, tag="checkpoint/written"):
    """Elements of tensors that one rank gave to be written into a checkpoint, and of what its files have then.

    Arrays, int64, the bits of all tensors one after another: ``given``, and ``written`` of those that are found.
    """

    owed = (Owed(every_rank, once),)

    tensors: tuple[str, ...]
    """Name of each in the checkpoint."""
    counts: Lengths
    """Elements of each that were given."""
    found: Lengths
    """Elements of each that are in the files: as many, or none where it is not there."""

    @property
    def party(self) -> tuple[str, int]:
        """The trainer rank, which the name tells."""
        return "trainer", int(self.name.rpartition(" ")[2])


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
