"""Knobs of GRPO: groups, reward, advantage, loss, reference, importance correction, filters, passes over a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from verifier.environments.environment import SINGLE, check_environment
from verifier.errors import UsageError
from verifier.knob import check, knob

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")
LOSSES = ("clipped", "gspo", "cispo", "importance")
LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoOptions:
    """GRPO and its kin; see docs/algorithms.md for the formulas.

    Raises:
        UsageError: a value that its knob does not allow, or knobs that contradict each other; names the keys.
    """

    group_size: int = knob("Answers of each prompt.", 8, least=1)
    max_answer_tokens: int = knob("Tokens of an answer, its end included, at most.", 64, least=1, unit="tokens")
    reward: str = knob("Reward of an answer: a name, or package.module:function.", "answer")
    reward_processes: int | None = knob(
        "Processes in which rewards and environments run; by default one a core, 8 at most.", None, least=1
    )  # fmt: skip
    reward_timeout_s: float = knob("Deadline of one reward, or of one turn of an environment.", 30.0, unit="seconds")
    reward_errors: str = knob(
        "A reward or environment that raises, dies or is late ends the run, or is a reward of 0.", "raise",
        choices=("raise", "zero"),
    )  # fmt: skip
    environment: str = knob(
        "Environment that answers turns: single, calculator, verifiers, or package.module:Class.", "single"
    )  # fmt: skip
    max_turns: int = knob("Turns of an episode, at most; each has max_answer_tokens.", 1, least=1)
    max_reply_tokens: int = knob(
        "Tokens that an environment puts between two turns, at most, those of the template included.", 64, least=1,
        unit="tokens",
    )  # fmt: skip
    step_wise: bool = knob("Train each turn as a rollout of its own, with all before it as its prompt.", False)
    advantage: str = knob("Estimator of advantages; plugins add others.", "grpo")
    loss: str = knob("Loss of a token; plugins add others.", "clipped")
    clip_low: float = knob("Ratios below 1 - clip_low are clipped.", 0.2)
    clip_high: float = knob("Ratios above 1 + clip_high are clipped.", 0.2)
    dual_clip: float | None = knob("Greatest ratio that counts where the advantage is negative.", None)
    ratio_over: str = knob(
        "Log-probability that the ratio divides by: the trainer's before the batch, or the engine's.", "old",
        choices=("old", "engine"),
    )  # fmt: skip
    temperature: float = knob("Divisor of the logits, of sampling and of training.", 1.0)
    entropy_weight: float = knob("Weight of the entropy, which the loss is lowered by.", 0.0)
    kl_weight: float = knob("Weight of the KL divergence from the weights that the run began with.", 0.0)
    kl_kind: str = knob("Estimate of the KL divergence.", "k3", choices=("k1", "k2", "k3"))
    kl_in: str = knob("Place of the KL divergence.", "loss", choices=("loss", "reward"))
    weight_level: str | None = knob(
        "Truncated importance weights old / engine by this ratio; null: none.", None, choices=LEVELS
    )  # fmt: skip
    weight_cap: float = knob("Greatest importance weight.", 2.0)
    mask_level: str | None = knob("Mask of tokens by this ratio old / engine; null: none.", None, choices=LEVELS)
    mask_low: float = knob("Least ratio that stays.", 0.5)
    mask_high: float = knob("Greatest ratio that stays.", 2.0)
    drop_overlong: bool = knob("Leave answers that were cut off out of the loss.", False)
    drop_zero_variance: bool = knob("Leave groups whose rewards are all equal out of the loss.", False)
    max_sampling_rounds: int = knob(
        "Rounds of sampling: groups whose rewards are all equal are replaced by new prompts; 1: none are.", 1,
        least=1,
    )  # fmt: skip
    mini_batches: int = knob("Optimizer steps of one pass over a batch.", 1, least=1)
    epochs: int = knob("Passes over a batch.", 1, least=1)
    replay_routes: bool = knob(
        "Routers of the trainer choose the experts that the engine chose (R3); vLLM reports them.", False
    )  # fmt: skip
    mode: str = knob(
        "Sampling before each step, while the step before trains, or so that new weights reach running requests.",
        "sync", choices=("sync", "async", "inflight"),
    )  # fmt: skip
    inflight_steps: int | None = knob(
        "Engine steps of a batch before the new weights reach it; null: half of max_answer_tokens.", None, least=1
    )  # fmt: skip
    keep_kv_cache: bool = knob("Requests that run keep keys and values of the old weights; else recomputed.", False)
    max_staleness: int = knob("Versions that sampled tokens may be behind the weights that they train.", 0, least=0)

    def __post_init__(self) -> None:
        check(self)
        for name in ("clip_low", "clip_high", "kl_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"grpo.{name} is {getattr(self, name):g}, it must be at least 0 and finite")
        if not 0 < self.reward_timeout_s < math.inf:
            raise UsageError(f"grpo.reward_timeout_s is {self.reward_timeout_s:g}, it must be above 0 and finite")
        if not 0 < self.temperature < math.inf:
            raise UsageError(f"grpo.temperature is {self.temperature:g}, it must be above 0 and finite")
        if self.dual_clip is not None and self.loss != "clipped":
            raise UsageError(
                f"grpo.dual_clip is {self.dual_clip:g} and grpo.loss is {self.loss}, which has none: use clipped"
            )
        if self.group_size == 1 and self.advantage in ("grpo", "dr_grpo", "rloo", "reinforce++_baseline"):
            raise UsageError(
                f"grpo.group_size is 1 and grpo.advantage is {self.advantage}, which compares the answers of a group: "
                "use 2 or more, or reinforce++"
            )
        self._refuse_bounds()
        self._refuse_unread()
        self._refuse_modes()
        self._refuse_turns()
        if self.max_sampling_rounds > 1 and self.group_size == 1:
            raise UsageError(
                f"grpo.max_sampling_rounds is {self.max_sampling_rounds} and grpo.group_size is 1: a group of one has "
                "one reward, so every prompt would be replaced, use grpo.group_size=2 or more"
            )
        if self.max_staleness and self.ratio_over == "old" and self.weight_level is None and self.mask_level is None:
            raise UsageError(
                f"grpo.max_staleness is {self.max_staleness} and grpo.ratio_over is old, which ignores staleness: "
                "use grpo.ratio_over=engine, or correct by grpo.weight_level or grpo.mask_level"
            )
        if self.ratio_over == "engine" and self.weight_level is not None:
            raise UsageError(
                f"grpo.ratio_over is engine and grpo.weight_level is {self.weight_level}: both correct for the engine, "
                "leave one of the two out"
            )

    def _refuse_bounds(self) -> None:
        """Refuse bounds of ratios that exclude everything."""
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise UsageError(f"grpo.dual_clip is {self.dual_clip:g}, it must be above 1 and finite, or null")
        if not 0 < self.weight_cap < math.inf:
            raise UsageError(f"grpo.weight_cap is {self.weight_cap:g}, it must be above 0 and finite")
        if not 0 <= self.mask_low <= self.mask_high:
            raise UsageError(
                f"grpo.mask_low is {self.mask_low:g} and grpo.mask_high is {self.mask_high:g}: no ratio would stay, "
                "use 0 <= grpo.mask_low <= grpo.mask_high"
            )

    def _refuse_unread(self) -> None:
        """Refuse knobs of what is not asked for, which nothing would read."""
        defaults = {item.name: item.default for item in fields(self)}
        for owner, off, names in (
            ("weight_level", None, ("weight_cap",)), ("mask_level", None, ("mask_low", "mask_high")),
            ("kl_weight", 0.0, ("kl_in", "kl_kind")),
        ):  # fmt: skip
            if getattr(self, owner) != off:
                continue
            for name in names:
                if (value := getattr(self, name)) != defaults[name]:
                    shown, at = f"{value:g}" if isinstance(value, float) else value, "null" if off is None else "0"
                    raise UsageError(
                        f"grpo.{name} is {shown} and grpo.{owner} is {at}: nothing would read it, leave it out, or set "
                        f"grpo.{owner}"
                    )

    def _refuse_turns(self) -> None:
        check_environment(self.environment)
        turns = f"grpo.environment is {self.environment} and grpo.max_turns is {self.max_turns}"
        if self.has_turns and self.max_turns == 1:
            raise UsageError(f"{turns}: no reply would ever be read, use grpo.max_turns=2 or more")
        if self.max_turns > 1 and not self.has_turns:
            raise UsageError(f"{turns}: nothing replies to a turn, leave grpo.max_turns out, or use calculator")
        if self.step_wise and not self.has_turns:
            raise UsageError(
                "grpo.step_wise is true and grpo.environment is single: an episode has one turn, leave it out, or give "
                "an environment"
            )
        if self.has_turns and self.mode == "inflight":
            raise UsageError(
                f"{turns}, and grpo.mode is inflight: an update reaches the requests of one turn alone so far, use "
                "grpo.mode=async"
            )
        if self.has_turns and self.replay_routes:
            raise UsageError(
                f"{turns}, and grpo.replay_routes is true: a later turn routes the tokens before it anew, leave "
                "grpo.replay_routes out"
            )
        if self.step_wise and self.max_sampling_rounds > 1:
            raise UsageError(
                f"grpo.step_wise is true and grpo.max_sampling_rounds is {self.max_sampling_rounds}: groups of steps "
                "are not replaced so far, leave one of the two out"
            )

    def _refuse_modes(self) -> None:
        if self.mode != "sync" and not self.max_staleness:
            raise UsageError(
                f"grpo.mode is {self.mode} and grpo.max_staleness is 0: a batch is sampled a version before it trains, "
                "use grpo.max_staleness=1, or grpo.mode=sync"
            )
        if self.mode != "inflight" and (self.inflight_steps is not None or self.keep_kv_cache):
            name = "keep_kv_cache is true" if self.keep_kv_cache else f"inflight_steps is {self.inflight_steps}"
            raise UsageError(
                f"grpo.{name} and grpo.mode is {self.mode}, in which no request runs during an update: leave it out, "
                "or use grpo.mode=inflight"
            )

    @property
    def steps_before_update(self) -> int:
        """Engine steps of a batch before the new weights reach it."""
        return self.inflight_steps or max(1, self.max_answer_tokens // 2)

    @property
    def has_turns(self) -> bool:
        """True if an environment answers turns."""
        return self.environment != SINGLE

    @property
    def has_reference(self) -> bool:
        """True if log-probabilities of the reference are needed."""
        return self.kl_weight > 0

    @property
    def updates(self) -> int:
        """Optimizer steps of one batch."""
        return self.mini_batches * self.epochs
