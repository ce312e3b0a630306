"""Records of the stage `train`: optimizer step."""

from __future__ import annotations

from typing import Literal

import msgspec

from verifier.core.owed import (
    Owed,
    after_another,
    anyone,
    every_rank,
    expert_rank,
    if_asked,
    if_frozen,
    if_idle,
    if_scored,
    if_stepped,
    per_gradient,
    per_live,
    per_step,
    per_update,
)
from verifier.core.record import Count, RankArrays, RankRecord, Real, Record, TensorRecord
from verifier.stages.load.records import ShardRecord
from verifier.stages.loss.records import KeptTensors


class TensorProduct(msgspec.Struct, frozen=True, kw_only=True):
    """Inner product of one tensor's weights and gradient, over the elements that a rank's optimizer is given."""

    name: str
    """Megatron's, with the checkpoint's numbers of layer and expert; of some of its rows with ``#`` and their kind."""
    product: Real
    """Sum over elements of weight times gradient; of a norm whose factor is 1 + w, of that factor."""
    squares: Real
    """Sum of the squares of what is added."""


class GradientProducts(RankRecord, frozen=True, kw_only=True, tag="train/products"):
    """Inner products of the weights of one rank and their gradients in one update, before the optimizer clips them."""

    owed = (Owed(every_rank, per_update),)

    products: tuple[TensorProduct, ...]
    """Products that the rank stands for among the ranks that hold the same bits: summed over ranks, the model's."""
    damped: Real | None = None
    """Sum over the rank's tokens, and norms that read the residual stream, of the magnitude of what the loss of all
    tokens would change by, times the factor's change, if epsilon were scaled as the stream's mean square is."""
    silent: tuple[str, ...] = ()
    """Tensors of which no element that the rank stands for has a gradient."""
    bent: bool = False
    """Logits are bent to a bound, so that they are not linear in the last norm's output."""


class SummedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Elements of one tensor's gradient on a rank: what its backward passes gave, and what its optimizer was given."""

    name: str
    group: str
    """Label of all ranks that hold the same bits, each of which has a part of the gradient's sum."""
    copies: Count
    """Number of those ranks."""
    begin: Count
    """Index of the first element in the flattened tensor."""
    elements: Count
    owned_begin: Count
    """Index, among the elements, of the first one that the rank's optimizer was given."""
    owned: Count
    """Number of elements that it was given."""
    dtype: Literal["float32", "bfloat16"]
    """Type in which gradients are added up."""
    size: Count = 0
    """Number of all elements of the tensor; 0 where they are not summed."""
    owned_size: Count = 0
    """Number of all elements that the rank's optimizer was given."""


class GradientSums(RankArrays, frozen=True, kw_only=True, tag="train/sums"):
    """Gradients of one rank in one update, on some elements of some tensors, and the squares of all.

    Arrays, float32, of all tensors one after another: ``added`` the sum of what each backward pass of the rank gave, in
    order; ``reduced`` what the optimizer was given of them, before it clips; ``used`` the weights that its passes used.
    And float64, [tensors, 4], ``whole``: of all elements of each the sum of what passes gave, that of its magnitudes,
    the number of those passes, and the sum of what the optimizer was given. Records of older runs have none.
    """

    owed = (Owed(every_rank, per_update),)

    tensors: tuple[SummedTensor, ...]
    squares: Real | None = None
    """Sum of squares, float64, of the gradients that this rank stands for; None where that is not known."""
    miscounted: tuple[str, ...] = ()
    """Tensors that the norm's marks leave out where the rank stands for them, or count where another one does."""
    divisor: Real | None = None
    """Divisor of the sum in what the optimizer was given; None: the number of tokens in the loss."""


class PreviousStep(Record, frozen=True, kw_only=True, tag="train/previous"):
    """The step before the one of the trace, or the last one of a run; the version is that of the weights it left."""

    owed = (Owed(anyone, after_another),)
    is_side = False

    updated: bool
    """It took an update, so that weights were sent."""
    here: bool
    """The process that recorded the trace took it."""


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
    updates_per_rate: Count = 1
    """Optimizer steps in each step of the schedule, as where it counts batches of several mini-batches."""
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


class AdamSample(RankArrays, frozen=True, kw_only=True, tag="train/adam"):
    """Some elements of some tensors of one rank around an update by Adam, and its settings.

    Arrays of all tensors one after another, in the types that the optimizer has but float32 for bfloat16:
    ``master_before``, ``exp_avg_before`` and ``exp_avg_sq_before``; ``gradient`` as it was reduced, before it is
    clipped; ``master``, ``exp_avg``, ``exp_avg_sq`` and ``weight`` after the update.
    """

    owed = (Owed(every_rank, per_update),)

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


class RouterBalance(RankArrays, frozen=True, kw_only=True, tag="train/balance"):
    """Score biases of one rank's routers in one optimizer step, and the tokens that they gave to each expert.

    Arrays, each [layers, experts]: ``before`` and ``after`` float32, the biases around the step; ``tokens`` int64, rows
    of the rank's micro-batches, padding included, that routers gave to the expert in the forward passes of the step;
    ``left`` float32, the biases as the update before left them, where this process has taken one.
    """

    owed = (Owed(expert_rank, per_update),)

    layers: tuple[Count, ...]
    """Global layer of each row, from 0."""
    rate: float
    """Change of a bias in a step that the config asks for; 0 leaves it as it is."""


class UpdatedShard(ShardRecord, frozen=True, kw_only=True, tag="train/shard"):
    """A live shard after the update that made its version."""

    owed = (Owed(every_rank, per_step),)


class FrozenShard(ShardRecord, frozen=True, kw_only=True, tag="train/frozen"):
    """A live shard of the base of an adapter, after a step of the adapter."""

    owed = (Owed(every_rank, if_frozen),)


class ShardAfterIdleStep(ShardRecord, frozen=True, kw_only=True, tag="train/idle"):
    """A live shard after an optimizer step of learning rate 0."""

    owed = (Owed(every_rank, if_idle),)


class ShardAfterScoring(ShardRecord, frozen=True, kw_only=True, tag="train/scored"):
    """A live shard after a pass that scores tokens."""

    owed = (Owed(every_rank, if_scored),)


class Update(Record, frozen=True, kw_only=True, tag="train/update"):
    """Change from the weights of the version before to those of a version."""

    owed = (Owed(anyone, per_step),)

    how: Literal["step", "noise", "adapter step"]
    """"noise" moves every tensor of floats; a step of an adapter moves nothing else."""


class JoinedTensor(TensorRecord, frozen=True, kw_only=True, tag="train/live"):
    """A checkpoint tensor joined from the live shards of all ranks by the independent layout."""

    owed = (Owed(anyone, per_live),)


class LiveAdapterMatrix(TensorRecord, frozen=True, kw_only=True, tag="train/adapter"):
    """A matrix of an adapter, joined from the live shards of all ranks by the independent layout."""

    owed = (Owed(anyone, if_stepped),)


class ScalingRecord(Record, frozen=True, kw_only=True):
    """The factor of an adapter's product."""

    scaling: Real
    """Alpha over rank."""


class LiveAdapterScaling(ScalingRecord, frozen=True, kw_only=True, tag="train/adapter-scaling"):
    """The factor of an adapter's product in the live model."""

    owed = (Owed(anyone, if_stepped),)


class StepReport(Record, frozen=True, kw_only=True, tag="train/step"):
    """Report of one rank's training step."""

    owed = (Owed(every_rank, per_gradient),)

    loss: Real
    """Mean over the tokens in the loss, nats."""
    num_tokens: Count
    """Tokens in the loss, over all ranks."""
    grad_norm: Real
    """L2 norm that the optimizer clipped by."""
    update: Count = 0
    """Number of the optimizer step in a training run, from 1; 0 where each version has one."""
    further_loss: Real = 0.0
    """Mean cross-entropy of the tokens that a layer for a further token (MTP) is trained on, nats."""
    num_further: Count = 0
    """Number of those tokens, over all ranks; 0 where the loss of such a layer is off."""


class OptimizerRule(Record, frozen=True, kw_only=True, tag="train/rule"):
    """Rule of each step: Adam, with rates by the number of rollouts that earlier steps have trained on."""

    owed = (Owed(anyone, if_asked),)
    is_side = False

    first_learning_rate: float
    """Learning rate at none."""
    learning_rate: float
    """Learning rate at `warm_up` rollouts: a straight line leads there."""
    least_learning_rate: float
    """Learning rate from `num_rollouts` on: half a cosine leads there."""
    embedding_learning_rate: float
    """The embedding's and the output's at `warm_up` rollouts; they begin as all others do."""
    least_embedding_learning_rate: float
    warm_up: Count
    num_rollouts: Count
    weight_decay: float
    """Weight decay of matrices at no rollouts; vectors do not decay."""
    greatest_weight_decay: float
    """Weight decay of matrices from `num_rollouts` on: a straight line leads there, from the first rollout."""
    clip_grad: float
    """Greatest L2 norm of a step's gradient; 0 does not clip."""
    beta_1: float = 0.9
    beta_2: float = 0.95
    epsilon: float = 1e-8


class KeptWeights(KeptTensors, frozen=True, kw_only=True, tag="train/kept"):
    """Weights of a version, whole."""


class KeptMatrices(KeptTensors, frozen=True, kw_only=True, tag="train/kept-matrices"):
    """Matrices of an adapter, of a version, by the names of the checkpoint's tensors."""
