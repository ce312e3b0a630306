"""Knobs of LoRA in a training run: adapters that are trained on a frozen base, and how an engine gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verifier.errors import UsageError
from verifier.knob import check, knob

if TYPE_CHECKING:
    from verifier.config.commands import EngineOptions

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linears of Megatron that can have an adapter."""
ENGINE_RANKS = (8, 16, 32, 64)
"""Ranks of adapters that the engine has room for as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Adapters, off unless a rank is given.

    Raises:
        UsageError: a value that its knob does not allow, or knobs that contradict each other; names the keys.
    """

    rank: int | None = knob("Rank of the adapters that are trained on a frozen base; null trains all weights.", None,
                            least=1)  # fmt: skip
    alpha: int | None = knob(
        "The adapters' product is multiplied by alpha / rank; by default alpha is twice the rank.", None, least=1
    )  # fmt: skip
    targets: tuple[str, ...] = knob("Linears of Megatron that have an adapter.", TARGETS)
    sync: str = knob(
        "Engine gets the adapter and keeps the base, or gets the weights with the adapter added to them.", "adapter",
        choices=("adapter", "merged"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        turned = {
            "alpha": self.alpha, "targets": None if self.targets == TARGETS else ",".join(self.targets),
            "sync": None if self.sync == "adapter" else self.sync,
        }  # fmt: skip
        for name, value in turned.items():
            if self.rank is None and value is not None:
                raise UsageError(f"lora.{name} is {value} and lora.rank is not given: give a rank, or leave it out")
        if not self.targets:
            raise UsageError(f"lora.targets is empty: name some of {', '.join(TARGETS)}")
        for target in self.targets:
            if target not in TARGETS:
                raise UsageError(f"lora.targets has `{target}`, it must be one of {', '.join(TARGETS)}")
        if len(set(self.targets)) < len(self.targets):
            raise UsageError(f"lora.targets is {', '.join(self.targets)}: name each linear once")

    @property
    def effective_alpha(self) -> int:
        """The alpha that was given, or its default."""
        return self.alpha or 2 * (self.rank or 0)

    def engine_rank(self, *, samples: bool) -> int:
        """Rank of the adapters that an engine makes room for; 0 where it gets none."""
        return self.rank if self.rank and samples and self.sync == "adapter" else 0

    def refuse_engine(self, engine: EngineOptions, *, samples: bool) -> None:
        """Refuse an engine that does not take the adapters.

        Args:
            engine: options of the engine.
            samples: the run samples from an engine.

        Raises:
            UsageError: names the knobs.
        """
        if engine.lora_rank:
            raise UsageError(
                f"engine.lora_rank is {engine.lora_rank}, which is a knob of `verifier roundtrip`: give lora.rank"
            )
        if self.sync == "merged" and not samples:
            raise UsageError("lora.sync is merged and the run samples from no engine: leave it out")
        rank = self.engine_rank(samples=samples)
        if not rank:
            return
        if rank not in ENGINE_RANKS:
            ranks = ", ".join(map(str, ENGINE_RANKS))
            raise UsageError(
                f"lora.rank is {rank} and lora.sync is adapter: vLLM takes adapters of rank {ranks}; choose one, or "
                "lora.sync=merged"
            )
        asked = {
            "engine.kind": engine.kind if engine.kind != "vllm" else "",
            "engine.tp": engine.tp if engine.tp > 1 else "",
            "engine.sleep_level": engine.sleep_level or "", "engine.quantization": engine.quantization or "",
        }  # fmt: skip
        for name, value in asked.items():
            if value:
                raise UsageError(
                    f"{name} is {value} and lora.sync is adapter, which takes an awake vLLM of one rank with "
                    "weights as they are: leave it out, or choose lora.sync=merged"
                )
