"""Records of a step's tokens: rollouts, log-probabilities, advantages, the loss that is asked for, and its report.

They come in calls of their own, and the columns of the loss are recorded when the step ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from verifier.algorithms.off_policy import LEVELS
from verifier.core.manifest import MeshSizes
from verifier.core.record import Array, Record, kind_of, real
from verifier.errors import UsageError
from verifier.probe.sharded import whole
from verifier.probe.tokens import Rows, StepTokens, step_tokens
from verifier.stages.advantage.records import ESTIMATORS, Advantages, PolicyColumns
from verifier.stages.data.records import Drops, SamplingAsked
from verifier.stages.load.records import Unbounded
from verifier.stages.logprob.records import TrainerLogprobs
from verifier.stages.loss.records import FORMULAS, KL_KINDS, GradientRecord, LossTerms
from verifier.stages.pack.records import Rollouts
from verifier.stages.rollout.records import SampledTokens
from verifier.stages.train.records import StepReport

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Dtypes of advantages, those with the most rounding first."""
EPSILONS = (0.0, 1e-4)
"""Least and greatest epsilon beside a standard deviation where a loop names none.

Source:
    0 in no-epsilon loops, 1e-9 in OpenRLHF, 1e-6 in verl and SkyRL, 1e-4 in TRL's `GRPOTrainer`.
"""
DDOFS = (1, 0)
"""Numbers to subtract from the terms under a variance where a loop does not say: `torch.std`, `numpy.std`."""

PLAIN = {"ratio_over": "old", "weight_level": "", "weight_cap": 1.0, "max_staleness": 0}
"""Fields of `PolicyColumns` of a step that says nothing of them."""


@dataclass
class OpenStep:
    """A step that has begun and was not recorded whole; arrays [N] over all tokens."""

    tokens: StepTokens
    old: np.ndarray | None = None
    reference: np.ndarray | None = None
    advantage: np.ndarray | None = None
    factor: np.ndarray | float = 1.0
    """Importance weights."""
    rejected: np.ndarray | bool = False
    """Tokens that left the loss mask after they were sampled."""
    estimator: str = ""
    reasons: tuple[str, ...] = ()
    policy: dict[str, Any] = field(default_factory=lambda: {**PLAIN})
    denominator: dict[str, Any] = field(default_factory=dict)
    has_rewards: bool = True
    has_engine: bool = True
    ends: tuple[int, ...] = ()
    truncated: tuple[bool, ...] = ()
    penalties: tuple[float, ...] = ()
    others: tuple[tuple[Any, ...], ...] = ()
    terms: LossTerms | None = None
    is_first: bool = True
    """The log-probabilities before the step are of the weights that it trains."""

    def number(self, name: str) -> int:
        """Number of a rollout by its id.

        Raises:
            UsageError: the step has no such rollout.
        """
        if name not in self._numbers:
            raise UsageError(f"the step has no rollout `{name}`")
        return self._numbers[name]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {own: at for at, own in enumerate(self.tokens.ids)}

    def length(self, name: str) -> int:
        """Tokens of a rollout, its prompt included."""
        return self.tokens.lengths[self.number(name)]

    def in_loss(self, name: str) -> np.ndarray:
        """[K] int64 positions of a rollout's tokens in the loss."""
        begin = self.starts[self.number(name)]
        found: np.ndarray = np.flatnonzero(self.tokens.mask[begin : begin + self.length(name)])
        return found

    def positions(self, name: str, size: int, what: str, *, shortest: bool = False) -> np.ndarray:
        """[K] int64 positions of the tokens that a row of values speaks of, the first token of a rollout left out.

        `shortest` takes a row of another length for one of the response.

        Raises:
            UsageError: the row is as long as neither the response nor the rollout.
        """
        response, whole = len(self.tokens.responses[self.number(name)]), self.length(name)
        if size not in (response, whole - 1, whole):
            if not shortest:
                raise UsageError(f"`{what}` has {size} values for rollout `{name}`, which has {response} or {whole}")
            size = response
        return np.arange(max(whole - size, 1), whole)

    @property
    def starts(self) -> np.ndarray:
        """[R] place of each rollout's first token among all of the step."""
        return np.cumsum([0, *self.tokens.lengths])[:-1]

    def weighted(self) -> np.ndarray | None:
        """[N] advantages, times importance weights."""
        return None if self.advantage is None else self.advantage * self.factor

    def divisor(self) -> np.ndarray | None:
        """[N] log-probabilities that the ratio divides by, float64."""
        over = self.old if self.policy["ratio_over"] == "old" else self.tokens.engine
        return None if over is None else over.astype(np.float64)


class StepRecorder(ABC):
    """Calls of one process on steps, which count from 1."""

    def __init__(self) -> None:
        self._steps: dict[int, OpenStep] = {}
        self._sent: set[int] = set()
        self.current = 0
        """Step that the loop is in, as the last call said."""

    rank: int = 0
    mesh: MeshSizes | None = None

    @abstractmethod
    def passes_begin(self) -> None:
        """Take what passes do from now on for those of a new step."""

    @abstractmethod
    def flush_passes(self, step: int, own: OpenStep) -> None:
        """Record what passes over a step's tokens have left."""

    @abstractmethod
    def reported(self, step: int, loss: float, num_tokens: int, grad_norm: float) -> None:
        """Take the report of a step."""

    def update_of(self, step: int) -> int:
        """Number of the optimizer step of a step."""
        return step

    def unbounded(self, kind: type[Record], why: str) -> None:
        """Say that evidence of a kind is there, or could be, and that nothing bounds it."""
        self.emit(Unbounded(name=kind_of(kind), version=max(self.current, 0), why=why))

    @abstractmethod
    def emit(self, record: Record, array: Array | Mapping[str, Array] | None = None) -> None:
        """Record one fact; see `verifier.core.store.Recorder.emit`."""

    def rollouts(
        self, step: int, *, prompts: Rows, responses: Rows, loss_mask: Rows, engine_logprobs: Rows | None = None,
        versions: int | Rows, rewards: Sequence[float] | None = None, groups: Sequence[Any] | None = None,
        ids: Sequence[Any] | None = None, temperature: float = 1.0, end_token: int | Sequence[int] | None = None,
        max_response_tokens: int | None = None, finish_reasons: Sequence[str] | None = None, num_prompts: int = 0,
        group_size: int = 0, vocab_size: int = 0, all_answers: bool = False,
    ) -> None:  # fmt: skip
        """Rollouts that a step trains on, as the loop holds them when it makes its batch.

        A row of `loss_mask`, `engine_logprobs` and `versions` has values of the response, of prompt and response, or of
        all but the first token.

        Args:
            step: number of the step, from 1.
            prompts: token ids of each.
            responses: token ids of each, those that a tool said among them.
            loss_mask: tokens in the loss.
            engine_logprobs: as the engine reported them, nats, at the temperature.
            versions: of the weights that sampled all tokens, or each; -1 where none did, as of a tool's.
            rewards: of each; needed for advantages.
            groups: rollouts of one prompt share it; by default equal prompts do.
            ids: by default "step/number".
            temperature: divisor of the logits, of engine and trainer.
            end_token: token that ends an answer, or several; with them and the greatest length, ends are judged.
            max_response_tokens: tokens that an answer may have.
            finish_reasons: of each why it ended, as the engine reported it: "stop" or "length".
            num_prompts: prompts that the step asked the engine for; 0 where that is not judged.
            group_size: answers that it asked for to each.
            vocab_size: of the model; with `all_answers` and entropies, it is judged how likely the answers are.
            all_answers: no answer was left out or replaced for what it says.

        Raises:
            UsageError: rows of other numbers or lengths; the step has rollouts already.
        """
        if step in self._steps:
            raise UsageError(f"the rollouts of step {step} were recorded before")
        found = step_tokens(
            prompts, responses, loss_mask, engine_logprobs, versions, rewards, groups, ids, temperature, step
        )
        self._steps[step] = OpenStep(
            found, has_rewards=rewards is not None, has_engine=engine_logprobs is not None
        )  # fmt: skip
        own, self.current = self._steps[step], step
        self.passes_begin()
        sampled = found.versions >= 0
        lengths, asked = found.lengths, tuple(map(len, found.prompts))
        roles = of_responses(found).astype(np.int8)
        roles[(roles == 1) & ~sampled] = 2
        record = Rollouts(
            name="rollouts", version=step, ids=found.ids, groups=found.groups, lengths=lengths, prompt_lengths=asked,
            rewards=found.rewards,
        )  # fmt: skip
        columns = {
            "tokens": found.tokens, "sampled": sampled, "mask": found.mask, "roles": roles, "logprobs": found.engine,
            "versions": found.versions,
        }  # fmt: skip
        self.emit(record, columns)
        ends = (end_token,) if isinstance(end_token, int) else tuple(end_token or ())
        own.ends, known = ends, bool(ends) and max_response_tokens is not None
        own.truncated = tuple(
            finish_reasons[at] == "length" if finish_reasons is not None else known and not {*row[-1:]} & {*ends}
            for at, row in enumerate(found.responses)
        )
        if engine_logprobs is not None:
            self._emit_sampled(step, found, (ends, max_response_tokens or 0), finish_reasons if known else None)
        ask = SamplingAsked(
            name="sampling", version=step, seed=None, batch_size=num_prompts, group_size=group_size, max_rounds=1,
            max_turns=1, temperature=temperature, max_answer_tokens=max_response_tokens or 0 if known else 0,
            end=ends[0] if known else 0, other_ends=ends[1:] if known else (), vocab_size=vocab_size,
            filtered=not all_answers, sent=tuple(sorted(self._sent)[-3:]),
        )  # fmt: skip
        self.emit(ask)

    def _emit_sampled(
        self, step: int, found: StepTokens, asked: tuple[tuple[int, ...], int], reasons: Sequence[str] | None
    ) -> None:
        """Runs of tokens that one version sampled, with what was reported of them.

        Where the response is one run, the reason of its end is that of the run.
        """
        runs: dict[int, list[tuple[tuple[int, ...], tuple[int, ...], np.ndarray, str]]] = {}
        begin = 0
        for at, (prompt, response) in enumerate(zip(found.prompts, found.responses, strict=True)):
            whole, end = prompt + response, begin + len(prompt) + len(response)
            by, nats = found.versions[begin:end], found.engine[begin:end]
            edges = [0, *(np.flatnonzero(np.diff(by)) + 1).tolist(), len(whole)]
            for a, b in pairwise(edges):
                if by[a] >= 0 and a:
                    alone = (a, b) == (len(prompt), len(whole))
                    reason = reasons[at] if reasons is not None and alone else ""
                    runs.setdefault(int(by[a]), []).append((whole[:a], whole[a:b], nats[a:b], reason))
            begin = end
        for version, own in sorted(runs.items()):
            known = [reason in ("stop", "length") for *_, reason in own]
            record = SampledTokens(
                name=f"step {step}", version=version, lengths=tuple(len(row[1]) for row in own),
                prompts=tuple(row[0] for row in own), tokens=tuple(row[1] for row in own),
                stops=tuple(asked[0] if told else () for told in known),
                limits=tuple(asked[1] if told else len(row[1]) for told, row in zip(known, own, strict=True)),
                ended=tuple(row[3] if told else "length" for told, row in zip(known, own, strict=True)),
                temperatures=(found.temperature,) * len(own),
            )  # fmt: skip
            self.emit(record, np.concatenate([row[2] for row in own]))

    def trainer_logprobs(
        self, step: int, values: Rows, *, reference: Rows | None = None, version: int | None = None
    ) -> None:
        """The trainer's log-probabilities of a step's tokens before the step, nats, at the rollouts' temperature.

        `reference` are those of the reference model, `version` that of weights older than those before the step. A row
        that is None was not scored, as of a rollout without tokens in the loss. Rows have values of the response, of
        all tokens, or of all but the first.

        Raises:
            UsageError: the step has no rollouts, or rows are of other lengths.
        """
        own = self.opened(step)
        tokens = own.tokens
        own.old = tokens.column(values, "trainer_logprobs")
        if reference is not None:
            own.reference = tokens.column(reference, "reference")
        own.is_first = version in (None, step - 1)
        record = TrainerLogprobs(
            name="old" if own.is_first else f"old of step {step}", version=step - 1 if version is None else version,
            lengths=tuple(0 if row is None else len(own) for row, own in zip(values, tokens.responses, strict=True)),
            temperature=tokens.temperature,
        )  # fmt: skip
        scored = np.repeat(np.array([row is not None for row in values], bool), tokens.lengths)
        self.emit(record, own.old[of_responses(tokens) & scored])

    def advantages(
        self, step: int, values: Rows | Sequence[float], *, estimator: str = "", reasons: Sequence[str] = (),
        ratio_over: str = "old", max_staleness: int = 0, dtype: str = "", epsilon: float | None = None,
        ddof: int | None = None, penalties: Sequence[float] = (), kl_weight: float = 0.0, kl_kind: str = "k3",
        others: Sequence[tuple[Any, float, float, int]] = (), weights: Rows = (), weight_level: str = "",
        weight_cap: float = math.inf, weight_floor: float = 0.0, masks: Sequence[tuple[str, float, float]] = (),
        rejected: Rows = (),
    ) -> None:  # fmt: skip
        """Advantages of a step, a number a rollout or a row of its tokens.

        Args:
            step: number of the step.
            values: of each rollout.
            estimator: "grpo", "grpo_batch", "grpo_others" (mean and deviation are those of the others of its group;
                undivided where these are equal), "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"; others are
                not judged.
            reasons: of each rollout why it is left out of the loss; empty for one that stays.
            ratio_over: "old" or "engine", the log-probabilities that the ratio divides by.
            max_staleness: versions that a token in the loss may be behind.
            dtype: that means and deviations were rounded to: "float64", "float32", "float16" or "bfloat16"; by
                default the narrowest in which every one of the values is exact.
            epsilon: added to the standard deviation; by default any of `EPSILONS` may have been.
            ddof: 1 where a variance divides by n - 1 terms, 0 where by n; by default either.
            penalties: of each rollout what a KL penalty took from its reward: `kl_weight` times the sum of the
                estimates `kl_kind`, of `trainer_logprobs` to its `reference`, over the tokens in the loss.
            kl_weight: see `penalties`; 0 where the KL is in the loss or nowhere.
            kl_kind: "k1", "k2" or "k3".
            others: rollouts that the estimator had and the step does not train on, such as those of other mini-batches
                or ranks: group, reward less its penalty, advantage, tokens in the loss.
            weights: importance weights of each token, "old" over engine, that its loss without KL and entropy is
                multiplied by.
            weight_level: ratio that they are of: "token", "sequence", or "geometric", the geometric mean.
            weight_cap: greatest weight.
            weight_floor: least weight.
            masks: of tokens by importance: level as `weight_level`, least and greatest ratio that stay. Or a level of
                the KL estimates of the engine from "old" and their bounds in nats: "token_k1", "sequence_k2" (their
                sum), "geometric_k3" (their mean), "greatest_k3". The factor of a token that a mask does not keep is 0.
            rejected: tokens that were sampled and left `loss_mask` since, instead of a factor of 0: those that `masks`
                do not keep. Without `masks` the rule is not known, and which they are is not judged.

        Raises:
            UsageError: the step has no rollouts or no rewards, rows are of other lengths, or an argument is none of
                these.
        """
        own = self.opened(step)
        tokens = own.tokens
        if ratio_over not in ("old", "engine"):
            raise UsageError(f"ratio_over is `{ratio_over}`: a ratio divides by `old` or by `engine`")
        if estimator in ESTIMATORS and not own.has_rewards:
            raise UsageError(f"step {step} has no rewards, of which `{estimator}` is: give them to `rollouts`")
        if dtype and dtype not in DTYPES:
            raise UsageError(f"dtype is `{dtype}`: advantages are {', '.join(DTYPES)}")
        if epsilon is not None and not 0 <= epsilon < math.inf:
            raise UsageError(f"epsilon is {epsilon:g}, it must be at least 0 and finite")
        if ddof not in (None, 0, 1):
            raise UsageError(f"ddof is {ddof}: a variance divides by n terms (0) or by n - 1 (1)")
        if weights and weight_level not in LEVELS and (weight_level or not masks):
            raise UsageError(f"weight_level is `{weight_level}`: weights are of {', '.join(LEVELS)}")
        known = {*LEVELS, *(f"{level}_{kind}" for level in (*LEVELS, "greatest") for kind in ("k1", "k2", "k3"))}
        if unknown := {level for level, *_ in masks} - known:
            raise UsageError(f"masks of `{min(unknown)}`: they are of {', '.join(sorted(known))}")
        if (ratio_over == "engine" or weights or masks) and not own.has_engine:
            raise UsageError(f"a ratio of step {step} divides by the engine's log-probabilities, it has none")
        if len(values) != len(tokens.ids):
            raise UsageError(f"`advantages` has {len(values)} rows for {len(tokens.ids)} rollouts")
        if all(np.ndim(on_host(row)) == 0 for row in values):
            values = [np.full(len(part), float(row)) for row, part in zip(values, tokens.responses, strict=True)]
        own.advantage = tokens.column(values, "advantages", fill=0.0, dtype=np.float64)
        if weights:
            own.factor = tokens.column(weights, "weights", fill=1.0, dtype=np.float64)
            limits = {"weight_floor": real(weight_floor), "weight_cap": real(weight_cap)}
            own.policy |= {"weight_level": weight_level, **limits}
        if len(rejected):
            own.rejected = tokens.column(rejected, "rejected", fill=0, dtype=bool)
            own.policy["rejects"] = True
        own.policy["masks"] = tuple((level, *map(real, bounds)) for level, *bounds in masks)
        own.others = tuple((str(group), *map(float, values), int(size)) for group, *values, size in others)
        own.estimator, own.reasons = estimator, tuple(reasons) or ("",) * len(tokens.ids)
        own.denominator = {
            "dtype": dtype or _narrowest(own.advantage),
            "epsilons": EPSILONS if epsilon is None else (float(epsilon), float(epsilon)),
            "ddofs": DDOFS if ddof is None else (ddof,),
        }  # fmt: skip
        own.policy |= {"ratio_over": ratio_over, "max_staleness": max_staleness}
        own.penalties = tuple(map(float, penalties)) or (0.0,) * len(tokens.ids)
        if len(own.penalties) != len(tokens.ids):
            raise UsageError(f"`penalties` has {len(own.penalties)} values for {len(tokens.ids)} rollouts")
        if penalties and own.reference is None:
            raise UsageError(f"step {step} has penalties and no reference: give it to `trainer_logprobs`")
        own.denominator |= {"kl_weight": kl_weight if penalties else 0.0, "kl_kind": kl_kind}

    def loss(
        self, step: int, name: str, *, aggregation: str = "token_mean", clip_low: float = 0.2, clip_high: float = 0.2,
        dual_clip: float | None = None, kl_weight: float = 0.0, kl_kind: str = "k3", entropy_weight: float = 0.0,
        kl_limit: float | None = None, kl_ratio: bool | Literal["own"] = False, divisor: float | None = None,
        parts: Sequence[Any] = (), steepness: tuple[float, float] = (1.0, 1.05),
        shares: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """The loss that a step is to have: its terms by the names of `verifier explain LSS004`, and its mean.

        `name` is "cross_entropy", "reinforce" (log-probability times advantage), "importance" (ratio times it),
        "clipped", "gspo", "cispo", "sapo", with its `steepness` for positive advantages and others, or "sequence":
        clipped by the product of a rollout's ratios. Others are not judged. `aggregation` is "token_mean",
        "sequence_mean" or "prompt_mean", over all tokens in the loss of all micro-batches and ranks. `divisor`, one for
        all ranks, is what the sum over tokens, or over means, of all ranks is divided by where that is not the number
        of those with tokens in the loss. `kl_kind` is one of `KL_KINDS`, at most `kl_limit`, where it has no gradient.
        With `kl_ratio` each token's KL estimate is multiplied by its ratio, the loss's, with a gradient (arXiv
        2512.02556); "own" is the ratio to the log-probability itself, of value 1 (arXiv 2506.09477). With `parts`, one
        of each rollout such as its micro-batch, "prompt_mean" is of their means. `shares` are, by "kl" and "entropy", a
        number of each rollout: the weight of its tokens in the mean of that term over that in the mean of the loss.

        Raises:
            UsageError: an unknown mean or estimate.
        """
        if kl_kind not in KL_KINDS:
            raise UsageError(f"the estimate `{kl_kind}` is none of {', '.join(KL_KINDS)}")
        if aggregation not in ("token_mean", "sequence_mean", "prompt_mean"):
            raise UsageError(f"the aggregation `{aggregation}` is none of token_mean, sequence_mean, prompt_mean")
        own = self.opened(step)
        own.terms = LossTerms(
            name=aggregation, version=step, loss=name, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip,
            kl_weight=kl_weight, kl_kind=kl_kind, kl_limit=kl_limit, kl_ratio=kl_ratio, entropy_weight=entropy_weight,
            temperature=own.tokens.temperature, divisor=divisor, parts=tuple(map(str, parts)), steepness=steepness,
            shares={key: tuple(map(float, row)) for key, row in shares.items()},
        )  # fmt: skip
        self.emit(own.terms)
        if name not in FORMULAS:
            for kind in (GradientRecord, LossTerms):
                self.unbounded(kind, f"no formula of the loss `{name}` is known")

    def step(
        self, step: int, *, loss: float | None = None, num_tokens: int | None = None, grad_norm: float | None = None
    ) -> None:
        """The end of a step: loss, tokens in it and L2 norm of the gradients before the clip, as the loop reports them.

        Raises:
            UsageError: some of the three are left out.
        """
        given = [value for value in (loss, num_tokens, grad_norm) if value is not None]
        if given:
            if loss is None or num_tokens is None or grad_norm is None:
                raise UsageError("a step's report has loss, num_tokens and grad_norm: give all three, or none")
            report = StepReport(
                name=f"step {step}", version=step, loss=real(float(on_host(loss))), num_tokens=int(num_tokens),
                grad_norm=real(float(on_host(grad_norm))), update=step,
            )  # fmt: skip
            self.emit(report)
            self.reported(step, float(on_host(loss)), int(num_tokens), float(on_host(grad_norm)))
        if step in self._steps:
            self._finish(step, self._steps.pop(step))

    def flush(self) -> None:
        """Record steps that were not ended."""
        for step in [*self._steps]:
            self._finish(step, self._steps.pop(step))

    def opened(self, step: int) -> OpenStep:
        """Step whose rollouts were recorded, and that has not ended.

        Raises:
            UsageError: there are none.
        """
        self.current = step
        if step not in self._steps:
            raise UsageError(f"step {step} has no rollouts yet: record them first")
        return self._steps[step]

    def _finish(self, step: int, own: OpenStep) -> None:
        """Record the columns that the loss of a step read."""
        self.flush_passes(step, own)
        tokens, nan = own.tokens, np.full(len(own.tokens.tokens), np.nan, np.float32)
        if own.old is None or not tokens.ids:
            return
        columns = {
            "old": own.old, "engine": tokens.engine,
            "divisor": own.old if own.policy["ratio_over"] == "old" else tokens.engine,
            "reference" if not own.denominator.get("kl_weight") else "penalty_reference": nan
            if own.reference is None
            else own.reference,
            "advantage": np.zeros(len(nan)) if own.advantage is None else own.weighted(),
            "mask": tokens.mask, "own": tokens.mask | own.rejected, "version": tokens.versions,
        }  # fmt: skip
        if not own.has_engine:
            del columns["engine"]
        record = PolicyColumns(
            name="policy", version=step, ids=tokens.ids, lengths=tokens.lengths, trained_version=step - 1, **own.policy
        )  # fmt: skip
        self.emit(record, columns)
        if own.advantage is None:
            return
        parts, masks = (np.split(values, own.starts[1:]) for values in (own.advantage, tokens.mask))
        inside = [part[mask] if mask.any() else part[-1:] for part, mask in zip(parts, masks, strict=True)]
        if own.estimator not in ESTIMATORS and any((part != part[0]).any() for part in inside):
            return  # one of each token, for which no check has a formula
        counts = tuple(int(mask.sum()) for mask in masks)
        groups, rewards, values, sizes = zip(*own.others, strict=True) if own.others else ((), (), (), ())
        ids = (*tokens.ids, *(f"beside step {step}/{at}" for at in range(len(groups))))
        made = Advantages(
            name="advantages", version=step, estimator=own.estimator, ids=ids, groups=(*tokens.groups, *groups),
            trajectories=ids, rewards=(*tokens.rewards, *rewards), penalties=(*own.penalties, *(0.0 for _ in groups)),
            token_counts=(*counts, *sizes),
            advantages=(*(real(part[-1]) for part in inside), *map(real, values)), **own.denominator,
        )  # fmt: skip
        self.emit(made)
        self.emit(
            Drops(
                name="drops", version=step, ids=tokens.ids, truncated=own.truncated, reasons=own.reasons,
                drop_overlong="overlong" in own.reasons, drop_zero_variance="zero_variance" in own.reasons,
            )
        )  # fmt: skip


def _narrowest(values: np.ndarray) -> str:
    """Narrowest dtype in which each of some float64 numbers is exact."""
    single = values.astype(np.float32)
    if not np.array_equal(single, values, equal_nan=True):
        return "float64"
    if not (single.view(np.uint32) & 0xFFFF).any():
        return "bfloat16"
    with np.errstate(over="ignore"):
        return "float16" if np.array_equal(values.astype(np.float16), values, equal_nan=True) else "float32"


def of_responses(tokens: StepTokens) -> np.ndarray:
    """[N] tokens that are a response's."""
    sizes = [len(part) for both in zip(tokens.prompts, tokens.responses, strict=True) for part in both]
    return np.repeat(np.tile([False, True], len(tokens.prompts)).astype(bool), np.array(sizes, np.int64))


def on_host(value: Any) -> Any:
    """A whole tensor on the host, without its graph; any other value as it is."""
    value = whole(value)
    return value.detach().cpu() if hasattr(value, "detach") else value
