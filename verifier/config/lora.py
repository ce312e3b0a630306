"""Knobs of LoRA in a training run: adapters that are trained on a frozen base, and how an engine gets them."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.knob import Knobs, knob

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linears of Megatron that can have an adapter."""
ENGINE_RANKS = (8, 16, 32, 64)
"""Ranks of adapters that the engine has room for as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions(Knobs):
    """Adapters, off unless a rank is given."""

    place = "lora."

    rank: int | None = knob("Rank of the adapters that are trained on a frozen base; null trains all weights.", None,
                            least=1)  # fmt: skip
    alpha: int | None = knob(
        "The adapters' product is multiplied by alpha / rank; by default alpha is twice the rank.", None, least=1
    )
    targets: tuple[str, ...] = knob("Linears of Megatron that have an adapter.", TARGETS)
    sync: str = knob(
        "Engine gets the adapter and keeps the base, or gets the weights with the adapter added to them.", "adapter",
        choices=("adapter", "merged"),
    )  # fmt: skip

    def _contradictions(self) -> dict[str, object]:
        turned = {"alpha": self.alpha, "targets": self.targets != TARGETS, "sync": self.sync != "adapter"}
        without = {
            f"{{lora.{name}}} and lora.rank is not given: give a rank, or leave it out": self.rank is None and value
            for name, value in turned.items()
        }
        unknown = {
            f"lora.targets has `{target}`, it must be one of {', '.join(TARGETS)}": target not in TARGETS
            for target in self.targets
        }
        return {
            **without,
            f"lora.targets is empty: name some of {', '.join(TARGETS)}": not self.targets,
            **unknown,
            "{lora.targets}: name each linear once": len(set(self.targets)) < len(self.targets),
        }

    @property
    def effective_alpha(self) -> int:
        """The alpha that was given, or its default."""
        return self.alpha or 2 * (self.rank or 0)

    def engine_rank(self, *, samples: bool) -> int:
        """Rank of the adapters that an engine makes room for; 0 where it gets none."""
        return self.rank if self.rank and samples and self.sync == "adapter" else 0
