"""Records of an optimizer of torch around its steps: gradients, rates, counters, and some elements of each update.

Hooks on the optimizer and on its parameters take them; the loop calls `optimizer` once and steps as it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from verifier.core.record import Array, Record, real
from verifier.errors import UsageError
from verifier.probe.losses import LossRecorder
from verifier.probe.sharded import is_partial, is_sharded, local, stands_for, whole
from verifier.stages.load.records import KnobsAsked, KnobsReached
from verifier.stages.train.records import (
    AdamSample,
    OptimizerSettings,
    TrainerStep,
)

if TYPE_CHECKING:
    import torch

    from verifier.stages.train.probe_adam_elements import UpdateSample
    from verifier.stages.train.probe_gradient_elements import Part

AUDITED = ("Adam", "AdamW")
"""Optimizers of torch whose formula is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Torch:
    """A parameter that an optimizer of torch updates, as `adam_elements.Held`."""

    name: str
    parameter: torch.Tensor
    group: dict[str, Any]
    optimizer: Any
    offset: int = 0

    @property
    def model(self) -> torch.Tensor:
        """The parameter, or this process's part of it."""
        found: torch.Tensor = local(self.parameter)
        return found

    @property
    def master(self) -> torch.Tensor:
        """The same."""
        return self.model

    @property
    def gradient(self) -> torch.Tensor:
        """Gradient that the optimizer reads; zeros for none."""
        own = self.parameter.grad
        found: torch.Tensor = self.model.new_zeros(self.model.shape) if own is None else local(own)
        return found

    def moments(self) -> Mapping[str, torch.Tensor]:
        """Adam's state, empty before the first step."""
        return {name: local(value) for name, value in self.optimizer.state.get(self.parameter, {}).items()}

    @property
    def steps(self) -> int:
        """Steps that the optimizer counts."""
        return int(self.moments().get("step", 0))


@dataclass(slots=True)
class _Update:
    """Facts of one optimizer step."""

    number: int
    sums: tuple[Record, Mapping[str, Array]] | None = None
    sample: UpdateSample | None = None
    clipped: bool = False
    """The gradient was taken before it is clipped."""
    steps: list[int] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)


class OptimizerRecorder(LossRecorder):
    """Calls of one process on its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._asked: dict[str, str] = {}
        self._owned: list[_Torch] = []
        self._unowned: tuple[str, ...] = ()
        self._settings: dict[str, Any] = {}
        self._clip_grad, self._divisor, self._updates_per_rate, self._has_parts = 0.0, 1.0, 1, False
        self._passes: dict[str, Part] = {}
        self._last: UpdateSample | None = None
        self._updates: dict[int, _Update] = {}
        self._reports: dict[int, tuple[float, int, float]] = {}
        self._taken, self._is_idle = 0, False
        self.world_size = 1

    def optimizer(
        self, optimizer: Any, named_parameters: Iterable[tuple[str, Any]], *, clip_grad: float = 0.0,
        asked: Mapping[str, Any] | None = None, scheduler: Any = None,
        schedule: Literal["constant", "linear", "cosine", ""] = "", learning_rate: float = 0.0, warmup_steps: int = 0,
        total_steps: int = 0, least_learning_rate: float = 0.0, weight_decay: float = 0.0, first_rate_step: int = 0,
        vectors_decay: bool | None = None, divisor: float | None = None, updates_per_rate: int = 1, parts: bool = False,
    ) -> None:  # fmt: skip
        """Watch an optimizer of torch from now on, one step of it in each step of the loop.

        Args:
            optimizer: `torch.optim.Adam` or `AdamW` in float32; of others rates, counters and gradients alone.
            named_parameters: of the model.
            clip_grad: greatest L2 norm of a step's gradient (`clip_grad_norm_`); 0 where it is not clipped.
            asked: settings that the loop's config asks of each group: "lr", "betas", "eps", "weight_decay".
            scheduler: of the rates, stepped after the optimizer.
            schedule: of the rates of all groups, from the warm-up to `total_steps`; empty where it is not judged.
            learning_rate: once the warm-up has ended.
            warmup_steps: in which the rate rises by equal amounts.
            total_steps: step with the least rate.
            least_learning_rate: there and after.
            weight_decay: that the loop's config asks for.
            first_rate_step: 0 where the first step has the rate of step 0, as transformers' schedulers give it; 1 where
                it has that of step 1.
            vectors_decay: whether norms and biases decay as matrices do; None where that is not judged, as of parts,
                which are flat.
            divisor: of the sum of all ranks' gradients in what the optimizer gets; by default the number of ranks, and
                for the weights of tokens (ADV001) that of ranks with rollouts of their own.
            updates_per_rate: optimizer steps in each step of the schedule and of `scheduler`, as verl's in a batch of
                several mini-batches or epochs.
            parts: the parameters are parts that no other rank has: masters of an optimizer that shards them.

        Raises:
            UsageError: an optimizer is watched already.
        """
        if self._optimizer is not None:
            raise UsageError("an optimizer is watched already: one process has one")
        self._optimizer, self._scheduler, self._clip_grad = optimizer, scheduler, clip_grad
        self._divisor, self.gradient_divisor = float(self.world_size if divisor is None else divisor), divisor
        self._updates_per_rate, self._has_parts = updates_per_rate, parts
        self._asked = {key: _said(value) for key, value in (asked or {}).items()}
        groups = {id(item): group for group in optimizer.param_groups for item in group["params"]}
        named = [(name, item) for name, item in named_parameters if item.requires_grad or id(item) in groups]
        self._owned = [
            _Torch(name=name, parameter=item, group=groups[id(item)], optimizer=optimizer)
            for name, item in sorted(named, key=lambda pair: pair[0])
            if id(item) in groups and local(item).numel()
        ]
        self._unowned = tuple(name for name, item in named if id(item) not in groups)
        if schedule:
            self._settings = {
                "schedule": schedule,
                "learning_rate": learning_rate,
                "least_learning_rate": least_learning_rate,
                "warmup_steps": warmup_steps,
                "decay_steps": total_steps,
                "weight_decay": weight_decay,
                "clip_grad": clip_grad,
                "behind": 1 - first_rate_step,
                "updates_per_rate": updates_per_rate,
                "vectors_decay": None if parts else vectors_decay,
            }
        optimizer.register_step_pre_hook(lambda *_: self._before_step())
        optimizer.register_step_post_hook(lambda *_: self._after_step())
        for item in self._owned:
            # FSDP2 gives a shard its gradient past autograd, and masters of their own get it as a copy. torch 2.11 ends
            # the process where a hook is put on a view whose base was written since, as Megatron's float32 masters are.
            if item.parameter.is_leaf and item.parameter.requires_grad and not is_sharded(item.parameter):
                item.parameter.register_hook(lambda found, name=item.name: self._passed(name, found))

    @property
    def _why(self) -> str:
        """Clause on why no formula bounds what the optimizer leaves; empty where one does."""
        kind, group = type(self._optimizer).__name__, self._optimizer.param_groups[0]
        if kind not in AUDITED or group.get("amsgrad") or group.get("maximize"):
            return f"the optimizer is {kind}, which no formula is known of"
        others = {str(item.model.dtype) for item in self._owned} - {"torch.float32"}
        return f"the optimizer's weights are in {min(others).removeprefix('torch.')}" if others else ""

    def passes_begin(self) -> None:
        """Forget what backward passes gave before this step."""
        self._passes = {}

    def _passed(self, name: str, found: torch.Tensor) -> None:
        """Add what a backward pass gives to some elements of some tensors."""
        import torch

        from verifier.stages.train.probe_gradient_elements import ELEMENTS, WHOLE, Part

        if name not in self._summed() or found.dtype not in (torch.float32, torch.bfloat16) or found.numel() > WHOLE:
            return
        if name not in self._passes:
            begin = (self._taken + 1) % -(-found.numel() // ELEMENTS) * ELEMENTS
            size, zeros = min(ELEMENTS, found.numel() - begin), torch.zeros(3, dtype=torch.float64)
            self._passes[name] = Part(
                name=name, group=name, copies=self.world_size, numel=found.numel(), begin=begin, size=size,
                added=found.detach().new_zeros(size), whole=zeros.to(found.device),
            )  # fmt: skip
        self._passes[name].add(found.detach())

    def _summed(self) -> set[str]:
        """Tensors of an update whose passes are added up, others in each."""
        from verifier.stages.train.probe_gradient_elements import TENSORS

        names = [item.name for item in self._owned]
        begin = self._taken * TENSORS % max(len(names), 1)
        return {*(names[begin:] + names[:begin])[:TENSORS]}

    def reduced(self, step: int) -> None:
        """Take the gradients that the optimizer is to be given, before they are clipped."""
        if self._optimizer is None:
            return
        import torch

        from verifier.stages.train.probe_gradient_elements import cut, sums_record

        self.current = step
        update = self._updates[step] = _Update(self._number())
        with torch.no_grad():
            update.sample, update.clipped = self._sample(update.number), True
            known = [(item, self._passes[item.name]) for item in self._owned if item.name in self._passes]
            for item, part in known:
                part.own(item.gradient)
                part.used = cut(item.model.detach(), part.begin, part.size)
            given = [item.parameter.grad for item in self._owned if item.parameter.grad is not None]
            counts = [self._has_parts or stands_for(own, self.rank) for own in given]
            summed = [whole(own) if is_partial(own) else local(own) for own in given]
            grads = [own for own, counted in zip(summed, counts, strict=True) if counted]
            squares = None
            if all(not is_sharded(own) or own.device_mesh.size() == self.world_size for own in given):
                squares = real(sum(float(own.double().square().sum()) for own in grads))
            update.sums = sums_record(
                [part for _, part in known], name=f"update {update.number}", version=step, coordinate=str(self.rank),
                squares=squares, divisor=self._divisor,
            )  # fmt: skip

    def _number(self) -> int:
        """Number of the optimizer step that comes next, from 1, by the optimizer's count when it was first seen."""
        if not self._taken:
            self._taken = max((item.steps for item in self._owned), default=0)
        return self._taken + 1

    def update_of(self, step: int) -> int:
        """Number of the optimizer step of a step."""
        if self._optimizer is None:
            return step
        return self._updates[step].number if step in self._updates else self._number()

    def _before_step(self) -> None:
        import torch

        from verifier.stages.train.probe_adam_elements import greatest_moment, group_of

        step = self.current
        self._is_idle = all(not float(group["lr"]) for group in self._optimizer.param_groups)  # a scheduler moves on
        update = self._updates.setdefault(step, _Update(self._number()))
        if update.fields:
            self.unbounded(TrainerStep, "the optimizer takes several steps in one of the loop")
            self.unbounded(AdamSample, "the optimizer takes several steps in one of the loop")
            return
        with torch.no_grad():
            groups = [
                group_of(group, [item.ndim for item in group["params"]]) for group in self._optimizer.param_groups
            ]
            update.fields = {
                "learning_rate": max((item.learning_rate for item in groups), key=float),
                "weight_decay": max((item.weight_decay for item in groups), key=float),
                "groups": tuple(groups),
            }
            if self._why:
                return
            if update.sample is None or not self._clip_grad:
                update.sample, update.clipped = self._sample(update.number), False
            sample = update.sample
            sample.look_back(self._last)
            if step == 1:
                sample.facts["begun_with"] = real(greatest_moment(self._owned))
            sample.begin()
            update.steps = [cast("_Torch", item.of).steps + 1 for item in sample.slices]

    def _sample(self, number: int) -> UpdateSample:
        """Sample of an update, with the gradients as they are now."""
        from verifier.stages.train.probe_adam_elements import UpdateSample, chosen

        sample = UpdateSample(chosen([own for own in self._owned if not is_partial(own.parameter.grad)], number))
        sample.take_gradient()
        return sample

    def _after_step(self) -> None:
        import torch

        step = self.current
        update = self._updates[step]
        if "learning_rate" not in update.fields or "optimizer_steps" in update.fields:
            return
        self._taken, self._passes = update.number, {}
        with torch.no_grad():
            self._last = update.sample if update.sample is not None and update.sample.before else None
            if self._last is not None:
                self._last.end()
        steps = max((item.steps for item in self._owned), default=update.number)
        counted = type(self._optimizer).__name__ in AUDITED
        update.fields |= {
            "optimizer_steps": steps if counted else update.number,
            "scheduler_steps": None if self._scheduler is None else int(self._scheduler.last_epoch),
            "scheduler_ahead": (steps - 1) // self._updates_per_rate - steps,
        }
        if self._asked:
            self.emit(KnobsAsked(name="optimizer", version=step, values=self._asked))
            groups = self._optimizer.param_groups
            values = {
                key: " | ".join(dict.fromkeys(_said(group[key]) if key in group else "absent" for group in groups))
                for key in self._asked
            }
            self.emit(KnobsReached(name=f"update {update.number}", version=step, values=values))
        if self._settings:
            betas = self._optimizer.param_groups[0].get("betas", (0.0, 0.0))
            epsilon = float(self._optimizer.param_groups[0].get("eps", 0.0))
            settings = OptimizerSettings(
                name="optimizer", version=step, beta_1=float(betas[0]), beta_2=float(betas[1]), epsilon=epsilon,
                **self._settings,
            )  # fmt: skip
            self.emit(settings)
        if self._why:
            self.unbounded(AdamSample, self._why)
        self._write(step)

    def reported(self, step: int, loss: float, num_tokens: int, grad_norm: float) -> None:
        """Take the report of a step, which may come before its optimizer's step or after it."""
        self._reports[step] = (loss, num_tokens, grad_norm)
        self._write(step)

    def _write(self, step: int, *, last: bool = False) -> None:
        """Record an update, once the step and its report are there."""
        update = self._updates.get(step)
        report = self._reports.get(step)
        if update is None or "optimizer_steps" not in update.fields or (report is None and not last):
            return
        name = f"update {update.number}"
        if report is not None:
            loss, num_tokens, norm = report
            done = TrainerStep(
                name=name, version=step, step=update.number, loss=real(loss), num_tokens=num_tokens,
                grad_norm=real(norm), **update.fields,
            )  # fmt: skip
            self.emit(done)
        if update.sums is not None:
            self.emit(*update.sums)
        sample = update.sample
        if sample is not None and sample.after and (report is not None or not update.clipped):
            group = self._optimizer.param_groups[0]
            clips = report is not None and update.clipped
            taken, arrays = sample.record(
                update.steps, name=name, version=step, coordinate=str(self.rank),
                clip_grad=self._clip_grad if clips else 0.0, grad_norm=done.grad_norm if clips else 0.0,
                beta_1=float(group["betas"][0]), beta_2=float(group["betas"][1]), epsilon=float(group["eps"]),
                decoupled=type(self._optimizer).__name__ == "AdamW" or bool(group.get("decoupled_weight_decay")),
                frozen=self._unowned,
            )  # fmt: skip
            self.emit(taken, arrays)
        update.sample = None
        self._reports.pop(step, None)
        update.fields = {"written": True}

    def flush_updates(self) -> None:
        """Record updates that no report came for."""
        for step in [*self._updates]:
            self._write(step, last=True)

    def is_idle(self) -> bool:
        """Tell whether the optimizer's last step had a rate of 0."""
        return self._optimizer is not None and self._is_idle


def _said(value: Any) -> str:
    """Text of a setting, numbers as float64."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value.item()) if hasattr(value, "item") else str(value)
    return f"{float(value):.17g}"
