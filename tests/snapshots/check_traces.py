"""A small run as the checks see it, all right; and for each check the smallest thing that goes wrong.

Two trainer ranks, one engine rank, the initial weights and one update; tensors `a` and `b`, replicated on both ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from verifier.core.evidence import Evidence
from verifier.core.stage import Stage
from verifier.core.trace import Trace

MANIFEST = {
    "command": "roundtrip",
    "complete": True,
    "dtype": "float32",
    "world_size": 2,
    "mesh": {"tp": 2, "cp": 1},
    "engine_ranks": 1,
    "synced_versions": [1],
}
SHAPES = {"a": (4, 2), "b": (3,)}
DRAWN = [int(digit) for digit in "001200102120010021010200020112001201002000120021010200102001"]
ARRAYS = {
    "right": torch.tensor([-1.5, -2.25, -0.5, -6.0, -6.25]),
    "close": torch.tensor([-1.5, -2.25, -0.5, -6.0, -6.250001]),
    "wrong": torch.tensor([-1.5, -2.25, -0.5, -6.0, -6.75]),
    "not finite": torch.tensor([-1.5, float("nan"), -0.5, -6.0, -6.25]),
    "shares": torch.tensor([0.5, 0.25, 0.25]).log(),
    "drawn": torch.tensor([0.5, 0.25, 0.25]).log()[DRAWN],
    "rows": torch.arange(6),
    "routes": torch.tensor([[0, 0, 1, 3, 2], [0, 1, 1, 0, 1]]),
    "other routes": torch.tensor([[0, 0, 1, 3, 2], [0, 1, 1, 0, 2]]),
}
LENGTHS = {"lengths": [3, 2]}
SAMPLED = {**LENGTHS, "tokens": [[1, 2, 3], [7, 5]], "stops": [[5, 9], [5, 9]], "limits": [3, 3]}


def digest(name: str, version: int) -> str:
    """Another digest for each (tensor, version)."""
    return f"vd1:{name * 4}{version:02d}" + "0123456789abcdef" * 2


def tensor(stage: Stage, kind: str, name: str, version: int, rank: int, role: str, /, **facts: object) -> Evidence:
    """One tensor as somebody saw it."""
    return Evidence(
        stage=stage, kind=kind, name=name, version=version, rank=rank, role=role,
        digest=digest(name, version), dtype="float32", shape=SHAPES[name], facts=facts,
    )  # fmt: skip


def clean() -> list[Evidence]:
    """Everything that a run without a fault records."""
    seen: list[Evidence] = []
    for name in SHAPES:
        seen.append(tensor(Stage.LOAD, "source", name, 0, 0, "source"))
        seen.append(tensor(Stage.PLAN, "entry", name, 0, 0, "trainer"))
        for rank in range(2):
            at = {"at": f"tp={rank}"}
            seen.append(tensor(Stage.LOAD, "expected", name, 0, rank, "trainer", **at))
            seen.append(tensor(Stage.LOAD, "shard", name, 0, rank, "trainer", replica=name, **at))
            seen.append(tensor(Stage.TRAIN, "shard", name, 1, rank, "trainer", replica=name, **at))
            seen.append(tensor(Stage.TRAIN, "idle", name, 0, rank, "trainer", **at))
            seen += [tensor(Stage.TRAIN, "scored", name, version, rank, "trainer", **at) for version in (0, 1)]
            seen += [tensor(Stage.EXPORT, "tensor", name, version, rank, "trainer") for version in (0, 1)]
            seen += [tensor(Stage.EXPORT, "exported", name, version, rank, "trainer", **at) for version in (0, 1)]
            kept = tensor(Stage.TRAIN, "frozen", name, 1, rank, "trainer", **at)
            seen.append(replace(kept, digest=digest(name, 0)))
        seen.append(tensor(Stage.EXPORT, "saved", name, 1, 0, "trainer"))
        seen += [tensor(stage, "adapter", name, 1, 0, "trainer") for stage in (Stage.TRAIN, Stage.EXPORT)]
        seen.append(tensor(Stage.TRAIN, "live", name, 1, 0, "trainer"))
        seen.append(tensor(Stage.TRANSPORT, "receipt", name, 1, 0, "engine"))
        shape = SHAPES[name]
        part = {"of": name, "holder": name, "box": [[0, size] for size in shape], "whole": list(shape)}
        seen += [
            tensor(Stage.ENGINE, kind, name, 1, 0, "engine", kind="parameter", **part)
            for kind in ("view", "view-expected", "state", "cold")
        ]
    plan = {"num_tensors": 2, "num_chunks": 1}
    for role, rank in (("trainer", 0), ("trainer", 1), ("engine", 0)):
        seen.append(
            Evidence(stage=Stage.PLAN, kind="plan", name="plan", role=role, rank=rank, digest="plan:1", facts=plan)
        )
    settings = {"variance_epsilon": "1e-06", "impl.scale": "0.25"}
    for kind, version in (("settings", 1), ("cold-settings", 0)):
        seen.append(
            Evidence(
                stage=Stage.ENGINE, kind=kind, name="layers.0", version=version, role="engine", facts=settings,
            )
        )  # fmt: skip
    config = {"num_experts_per_tok": "4", "transformers_version": '"5.12.1"'}
    for stage in (Stage.LOAD, Stage.EXPORT):
        seen.append(Evidence(stage=stage, kind="config", name="config.json", version=1, facts=config))
    seen.append(
        Evidence(stage=Stage.TRAIN, kind="moved", name="update", version=1, facts={"moved": 2, "least": 1, "total": 2})
    )
    seen.append(
        Evidence(
            stage=Stage.ENGINE, kind="loaded", name="loaded", version=1, role="engine", facts={"names": ["a", "b"]}
        )
    )
    for name in SHAPES:
        measured = {
            "gradient_gap": 1e-9, "gradient_scale": 0.25, "gradient_norm": 2.0, "gradient_noise": 0.0,
            "gradient_dtype": "float32", "step_gap": 1e-4, "loss": 7.000001, "loss_scale": 7.5, "num_tokens": 5,
        }  # fmt: skip
        seen.append(Evidence(stage=Stage.LOSS, kind="gradient", name=name, version=1, role="oracle", facts=measured))
    stepped = {"loss": 7.0, "grad_norm": 2.000001, "num_tokens": 5}
    seen.append(Evidence(stage=Stage.TRAIN, kind="step", name="step", version=1, facts=stepped))
    passed = {"count": 2, "overwritten": []}
    seen.append(Evidence(stage=Stage.EXPORT, kind="stream", name="the export", version=1, facts=passed))
    seen.append(Evidence(stage=Stage.EXPORT, kind="saved-files", name="shards", version=1, facts={"count": 1}))
    seen += tokens() + routes()
    poisoned = {"intact": [], "total": 2, "left": [], "declared": []}
    seen.append(Evidence(stage=Stage.ENGINE, kind="poison", name="poison", version=1, role="engine", facts=poisoned))
    seen.append(Evidence(stage=Stage.TRANSPORT, kind="handover", name="transfer", version=1, facts={"refused": ""}))
    facts = {"tokens": DRAWN}
    seen.append(
        Evidence(stage=Stage.ROLLOUT, kind="drawn", name="drawn", version=1, role="engine", facts=facts, array="drawn")
    )
    seen.append(Evidence(stage=Stage.LOGPROB, kind="next", name="drawn", version=1, role="oracle", array="shares"))
    for version in (0, 1):
        seen += [
            Evidence(stage=Stage.LOGPROB, kind="returned", name="batch", version=version, rank=rank, digest="vd1:5")
            for rank in range(2)
        ]
        for stage, kind, role, array in (
            (Stage.LOGPROB, "trainer", "trainer", "close"),
            (Stage.LOGPROB, "oracle", "oracle", "right"),
            (Stage.ROLLOUT, "engine", "engine", "close"),
            (Stage.ROLLOUT, "sampled", "engine", "close"),
            (Stage.LOGPROB, "sampled-oracle", "oracle", "right"),
        ):
            seen.append(
                Evidence(stage=stage, kind=kind, name="batch", version=version, role=role, facts=SAMPLED, array=array)
            )
    return seen


def tokens() -> list[Evidence]:
    """One packed micro-batch of two rollouts, of 3 and 2 tokens, on both ranks of a tensor-parallel group."""
    at = [f"tp={rank} pp=0 ep=0 etp=0 cp=0 dp=0" for rank in range(2)]
    seen = [
        Evidence(
            stage=Stage.PACK, kind="batch", name="trained dp=0 cp=0", version=1, rank=rank, digest="vd1:" + "b" * 32,
            facts={"at": at[rank], "micro_batches": 1},
        )
        for rank in range(2)
    ]  # fmt: skip
    cut = {
        "cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 4, 6], "max_seqlen": 4, "lengths": [3, 2], "cp_rank": 0,
        "filler": False,
    }  # fmt: skip
    seen.append(
        Evidence(stage=Stage.PACK, kind="layout", name="trained micro-batch 0", version=1, facts=cut, array="rows")
    )
    audit = {"tokens": 3, "misplaced": 0, "shown": []}
    seen.append(Evidence(stage=Stage.PACK, kind="ledger", name="trained sequence-0", version=1, facts=audit))
    return seen


def routes() -> list[Evidence]:
    """Routes of two tokens of one rollout (rollout, position, layer, two experts), as given and as used."""
    who = {"rollouts": ["sequence-0", "sequence-1"], **LENGTHS}
    return [
        Evidence(stage=Stage.REPLAY, kind=kind, name=name, role="trainer", facts=facts, array=array)
        for kind, name, facts, array in (
            ("routes", "made-up routes", {"rollouts": ["sequence-0"]}, "routes"),
            ("forced", "made-up routes", who, "close"),
            ("oracle", "made-up routes", who, "right"),
            ("choice", "made-up routes", {"at": "tp=0"}, "routes"),
            ("natural", "natural routes", who, "right"),
            ("scored", "natural routes replayed", who, "right"),
        )
    ]


def make_trace(evidence: list[Evidence]) -> Trace:
    """A trace of these facts, with the arrays in memory."""
    return Trace(MANIFEST, evidence, ARRAYS.__getitem__)


Change = Callable[[Evidence], Evidence | None]


def change(stage: Stage, kind: str, how: Change, **equal: object) -> list[Evidence]:
    """The clean run with the first fact that matches changed, or taken away where `how` gives None."""
    seen, done = [], False
    for item in clean():
        matches = item.stage is stage and item.kind == kind and all(getattr(item, k) == v for k, v in equal.items())
        if matches and not done:
            done = True
            changed = how(item)
            seen += [] if changed is None else [changed]
        else:
            seen.append(item)
    assert done, f"the clean run has no {stage.label}/{kind} with {equal}"
    return seen


def other_bits(item: Evidence) -> Evidence:
    """Some other content."""
    return replace(item, digest="vd1:" + "f" * 32)


def bits_of_b(item: Evidence) -> Evidence:
    """The content that `b` should hold."""
    return replace(item, digest=digest("b", item.version))


def rounded(item: Evidence) -> Evidence:
    """Another dtype on the way."""
    return replace(item, dtype="bfloat16", digest="vd1:" + "e" * 32)


def gone(item: Evidence) -> None:
    """Not recorded at all."""


def with_array(name: str) -> Change:
    """The same fact with another payload."""
    return lambda item: replace(item, array=name)


def with_facts(**facts: object) -> Change:
    """The same fact with other details."""
    return lambda item: replace(item, facts={**item.facts, **facts})


BROKEN: dict[str, list[Evidence]] = {
    "LSS001": change(Stage.LOSS, "gradient", with_facts(gradient_gap=0.125), name="b"),
    "LSS002": change(Stage.TRAIN, "step", with_facts(loss=14.0)),
    "LGP004": change(Stage.ROLLOUT, "drawn", with_facts(tokens=[0] * 60)),
    "LGP005": change(Stage.ROLLOUT, "drawn", with_facts(tokens=[0, 1, 0, 2] * 15)),
    "LGP006": change(Stage.ROLLOUT, "sampled", with_facts(tokens=[[1, 9, 3], [7, 5]]), version=1),
    "RPL001": change(Stage.REPLAY, "choice", with_array("other routes")),
    "RPL002": change(Stage.REPLAY, "scored", with_array("close")),
    "RPL003": change(Stage.REPLAY, "forced", with_array("wrong")),
    "TRN001": change(Stage.LOSS, "gradient", with_facts(step_gap=0.5), name="a"),
    "WGT001": change(Stage.LOAD, "shard", other_bits, name="a", rank=1),
    "WGT002": change(Stage.TRAIN, "shard", other_bits, name="b", rank=1),
    "WGT004": change(Stage.EXPORT, "tensor", bits_of_b, name="a", rank=0, version=0),
    "WGT005": change(Stage.EXPORT, "tensor", other_bits, name="a", rank=0, version=1),
    "WGT006": change(Stage.EXPORT, "tensor", gone, name="a", rank=1, version=1),
    "WGT007": change(Stage.TRAIN, "idle", other_bits, name="b", rank=0),
    "WGT008": change(Stage.TRAIN, "moved", with_facts(moved=0)),
    "WGT009": change(Stage.TRAIN, "scored", other_bits, name="b", rank=1, version=1),
    "WGT010": change(Stage.EXPORT, "exported", other_bits, name="a", rank=1, version=0),
    "WGT011": change(Stage.EXPORT, "config", with_facts(num_experts_per_tok="2")),
    "WGT012": change(Stage.TRAIN, "frozen", other_bits, name="b", rank=1),
    "WGT013": change(Stage.EXPORT, "adapter", bits_of_b, name="a"),
    "WGT014": change(Stage.EXPORT, "saved", gone, name="b"),
    "WGT015": change(Stage.EXPORT, "tensor", rounded, name="b", rank=0, version=1),
    "WGT016": change(Stage.EXPORT, "stream", with_facts(overwritten=["a"])),
    "PCK001": change(Stage.PACK, "ledger", with_facts(misplaced=1, shown=[[2, "label", 7, 8]])),
    "PCK002": change(Stage.PACK, "layout", with_facts(cu_seqlens_padded=[0, 3, 5])),
    "PCK003": change(Stage.PACK, "batch", other_bits, rank=1),
    "PLN001": change(Stage.PLAN, "plan", lambda item: replace(item, digest="plan:2"), role="trainer", rank=1),
    "PLN002": change(Stage.PLAN, "entry", rounded, name="b"),
    "TPT001": change(Stage.TRANSPORT, "receipt", rounded, name="b"),
    "TPT002": change(Stage.TRANSPORT, "receipt", gone, name="b"),
    "TPT003": change(Stage.TRANSPORT, "handover", with_facts(refused="tensor 1 is `b`, the plan says `a`")),
    "ENG001": change(Stage.ENGINE, "view", bits_of_b, name="a"),
    "ENG002": change(Stage.ENGINE, "state", other_bits, name="a"),
    "ENG003": change(Stage.ENGINE, "poison", with_facts(intact=["rotary.inv_freq"])),
    "ENG004": change(Stage.ENGINE, "loaded", with_facts(names=["b"])),
    "ENG005": change(Stage.ENGINE, "settings", with_facts(variance_epsilon="1e-05")),
    "ENG006": change(Stage.ENGINE, "view", with_facts(box=[[0, 2], [0, 2]]), name="a"),
    "LGP001": change(Stage.LOGPROB, "trainer", with_array("wrong"), version=1),
    "LGP002": change(Stage.ROLLOUT, "engine", with_array("not finite"), version=1),
    "LGP003": change(Stage.ROLLOUT, "sampled", with_facts(lengths=[4, 1]), version=0),
}
"""Check -> the clean run with the smallest thing wrong that it has to see."""
