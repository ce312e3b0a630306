"""Knobs of GRPO: groups, reward, advantage, loss, reference, importance correction, filters, passes over a batch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from verifier.environments.environment import SINGLE, check_environment
from verifier.knob import Knobs, knob

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")
LOSSES = ("clipped", "gspo", "cispo", "importance")
LEVELS = ("token", "sequence", "geometric")
_READ_BESIDE = {
    "weight_cap": "weight_level",
    "mask_low": "mask_level",
    "mask_high": "mask_level",
    "kl_in": "kl_weight",
    "kl_kind": "kl_weight",
}
"""Knob -> the one that turns on what it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoOptions(Knobs):
    """GRPO and its kin; see docs/algorithms.md for the formulas."""

    place = "grpo."

    group_size: int = knob("Answers of each prompt.", 8, least=1)
    max_answer_tokens: int = knob("Tokens of an answer, its end included, at most.", 64, least=1, unit="tokens")
    reward: str = knob("Reward of an answer: a name, or package.module:function.", "answer")
    reward_processes: int | None = knob(
        "Processes in which rewards and environments run; by default one a core, 8 at most.", None, least=1
    )
    reward_timeout_s: float = knob(
        "Deadline of one reward, or of one turn of an environment.", 30.0, above=0, unit="seconds"
    )
    reward_errors: str = knob(
        "A reward or environment that raises, dies or is late ends the run, or is a reward of 0.", "raise",
        choices=("raise", "zero"),
    )  # fmt: skip
    environment: str = knob(
        "Environment that answers turns: single, calculator, verifiers, or package.module:Class.", "single"
    )
    max_turns: int = knob("Turns of an episode, at most; each has max_answer_tokens.", 1, least=1)
    max_reply_tokens: int = knob(
        "Tokens that an environment puts between two turns, at most, those of the template included.", 64, least=1,
        unit="tokens",
    )  # fmt: skip
    step_wise: bool = knob("Train each turn as a rollout of its own, with all before it as its prompt.", False)
    advantage: str = knob("Estimator of advantages; plugins add others.", "grpo")
    loss: str = knob("Loss of a token; plugins add others.", "clipped")
    clip_low: float = knob("Ratios below 1 - clip_low are clipped.", 0.2, least=0)
    clip_high: float = knob("Ratios above 1 + clip_high are clipped.", 0.2, least=0)
    dual_clip: float | None = knob("Greatest ratio that counts where the advantage is negative.", None, above=1)
    ratio_over: str = knob(
        "Log-probability that the ratio divides by: the trainer's before the batch, or the engine's.", "old",
        choices=("old", "engine"),
    )  # fmt: skip
    temperature: float = knob("Divisor of the logits, of sampling and of training.", 1.0, above=0)
    request_seeds: bool = knob(
        "Each answer is sampled with a seed of its own; without, the engine's generator serves all.", True
    )  # fmt: skip
    entropy_weight: float = knob("Weight of the entropy, which the loss is lowered by.", 0.0)
    kl_weight: float = knob("Weight of the KL divergence from the weights that the run began with.", 0.0, least=0)
    kl_kind: str = knob("Estimate of the KL divergence.", "k3", choices=("k1", "k2", "k3"))
    kl_in: str = knob("Place of the KL divergence.", "loss", choices=("loss", "reward"))
    weight_level: str | None = knob(
        "Truncated importance weights old / engine by this ratio; null: none.", None, choices=LEVELS
    )
    weight_cap: float = knob("Greatest importance weight.", 2.0, above=0)
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
    )
    mode: str = knob(
        "Sampling before each step, while the step before trains, or so that new weights reach running requests.",
        "sync", choices=("sync", "async", "inflight"),
    )  # fmt: skip
    inflight_steps: int | None = knob(
        "Engine steps before new weights reach requests; null: max_answer_tokens / (max_staleness + 1).", None, least=1
    )
    keep_kv_cache: bool = knob("Requests that run keep keys and values of the old weights; else recomputed.", False)
    max_staleness: int = knob(
        "Versions that sampled tokens may be behind the weights that they train, and batches sampled ahead.", 0, least=0
    )

    def _contradictions(self) -> dict[str, object]:
        check_environment(self.environment)
        in_flight, turns = self.mode == "inflight", "{grpo.environment} and {grpo.max_turns}"
        compares = self.advantage in ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
        corrects = self.weight_level is not None or self.mask_level is not None
        defaults = {item.name: item.default for item in fields(self)}
        unread = {
            f"{{grpo.{name}}} and {{grpo.{owner}}}: nothing would read it, leave it out, or set grpo.{owner}": (
                getattr(self, owner) in (None, 0.0) and getattr(self, name) != defaults[name]
            )
            for name, owner in _READ_BESIDE.items()
        }
        of_requests = {
            f"{{grpo.{name}}} and {{grpo.mode}}, in which no request runs during an update: leave it out, or use "
            "grpo.mode=inflight": is_asked and not in_flight
            for name, is_asked in (("keep_kv_cache", self.keep_kv_cache), ("inflight_steps", self.inflight_steps))
        }
        return {
            "{grpo.dual_clip} and {grpo.loss}, which has none: use clipped": self.dual_clip and self.loss != "clipped",
            "{grpo.group_size} and {grpo.advantage}, which compares the answers of a group: use 2 or more, or "
            "reinforce++": self.group_size == 1 and compares,
            "{grpo.mask_low} and {grpo.mask_high}: no ratio would stay, use 0 <= grpo.mask_low <= grpo.mask_high": (
                not 0 <= self.mask_low <= self.mask_high
            ),
            **unread,
            "{grpo.mode} and {grpo.max_staleness}: a batch is sampled a version before it trains, use "
            "grpo.max_staleness=1, or grpo.mode=sync": self.mode != "sync" and not self.max_staleness,
            "{grpo.keep_kv_cache} and {grpo.max_staleness}: keys of older weights leave the engine's cache when no "
            "request runs, use grpo.max_staleness=1": self.keep_kv_cache and self.max_staleness > 1,
            **of_requests,
            f"{turns}: no reply would ever be read, use grpo.max_turns=2 or more": (
                self.has_turns and self.max_turns == 1
            ),
            f"{turns}: nothing replies to a turn, leave grpo.max_turns out, or use calculator": (
                self.max_turns > 1 and not self.has_turns
            ),
            "{grpo.step_wise} and {grpo.environment}: an episode has one turn, leave it out, or give an environment": (
                self.step_wise and not self.has_turns
            ),
            f"{turns}, and {{grpo.mode}}: an update reaches the requests of one turn alone so far, use "
            "grpo.mode=async": self.has_turns and in_flight,
            f"{turns}, and {{grpo.replay_routes}}: a later turn routes the tokens before it anew, leave "
            "grpo.replay_routes out": self.has_turns and self.replay_routes,
            "{grpo.step_wise} and {grpo.max_sampling_rounds}: groups of steps are not replaced so far, leave one of "
            "the two out": self.step_wise and self.max_sampling_rounds > 1,
            "{grpo.max_sampling_rounds} and {grpo.group_size}: a group of one has one reward, so every prompt would be "
            "replaced, use grpo.group_size=2 or more": self.max_sampling_rounds > 1 and self.group_size == 1,
            "{grpo.max_staleness} and {grpo.ratio_over}, which ignores staleness: use grpo.ratio_over=engine, or "
            "correct by grpo.weight_level or grpo.mask_level": (
                self.max_staleness and self.ratio_over == "old" and not corrects
            ),
            "{grpo.ratio_over} and {grpo.weight_level}: both correct for the engine, leave one of the two out": (
                self.ratio_over == "engine" and self.weight_level is not None
            ),
        }

    @property
    def steps_before_update(self) -> int:
        """Engine steps between two updates of the weights."""
        return self.inflight_steps or max(1, self.max_answer_tokens // (self.max_staleness + 1))

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
