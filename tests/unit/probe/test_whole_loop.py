"""Checks that judge a recorded loop: each holds on the right one, and is violated by one wrong thing in its stage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import verifier.checks  # noqa: F401 - fills the registry
from tests.meta.probe_table import judges_loops
from tests.unit.probe.whole_loop import CONFIG, END, VOCABULARY, Loop, checkpoint
from verifier import probe
from verifier.core.check import REGISTRY
from verifier.core.finding import Verdict
from verifier.core.store import read
from verifier.report import Report, render_text, report_of

FAULTS = [
    "ADV001",
    "ADV002",
    "ADV003",
    "ADV004",
    "CFG001",
    "CKP001",
    "CKP004",
    "DAT004",
    "DAT007",
    "DAT008",
    "DAT009",
    "DAT011",
    "DAT014",
    "DAT015",
    "DAT016",
    "ENG001",
    "ENG002",
    "ENG003",
    "ENG004",
    "ENG005",
    "ENG007",
    "ENG009",
    "ENG010",
    "LGP006",
    "LGP008",
    "LGP009",
    "LGP010",
    "LGP011",
    "LGP013",
    "LGP015",
    "LGP017",
    "LSS003",
    "LSS004",
    "PCK001",
    "PCK002",
    "PCK004",
    "PLN002",
    "RPL001",
    "RWD001",
    "TPT001",
    "TPT002",
    "TPT002 by a refusal",
    "TRN002",
    "TRN003",
    "TRN005",
    "TRN006",
    "WGT001",
    "WGT004",
    "WGT005",
    "WGT006 in another order",
    "WGT008",
    "WGT010",
    "WGT010 after scoring",
    "WGT011",
    "WGT014",
    "WGT016",
    "WGT019",
    "WGT021",
]
"""Check that has to see what is wrong in the loop."""


def judged(folder: Path, fault: str = "") -> Report:
    Loop(folder, fault).run(folder / "trace")
    return report_of(read(folder / "trace"), "trace")


def test_a_right_loop_holds_in_all_that_it_hands_over(tmp_path: Path) -> None:
    report = judged(tmp_path)
    assert report.verdict is Verdict.HOLDS, render_text(report)
    assert {item.code for item in report.outcomes} >= {fault[:6] for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_thing_is_seen(fault: str, tmp_path: Path) -> None:
    report = judged(tmp_path, fault)
    assert fault[:6] in [item.code for item in report.violated], render_text(report)


def ranks(path: Path, wrong: str) -> None:
    """Two ranks of tensor parallelism, each of which holds and exports the whole weights."""
    with (
        probe.open(path, dtype="float32", rank=0, world_size=2, mesh={"tp": 2}) as first,
        probe.open(path, dtype="float32", rank=1, world_size=2, mesh={"tp": 2}) as second,
    ):
        for rank, record in enumerate((first, second)):
            more = {code: torch.full((2,), float(rank and wrong == code)) for code in ("WGT002", "WGT006", "PCK003")}
            record.weights_held({"a": torch.ones(2)}, 0, after="load")
            record.weights_held({"a": torch.ones(2) + more["WGT002"]}, 1, after="step")
            record.weights_exported({"a": torch.ones(2) + more["WGT006"], "b": torch.ones(1)}, 1)
            record.rollouts(1, prompts=[[1, 2]], responses=[[3]], loss_mask=[[1]], versions=0, ids=["x"])
            record.micro_batch(1, ["x"], torch.tensor([[1, 2, 3]]), loss_mask=[[0, 1, int(more["PCK003"][0])]])


def adapters(path: Path, wrong: str) -> None:
    """A LoRA adapter that an engine gets, and its base."""
    a, b = torch.randn(2, 4), torch.randn(3, 2)
    base = torch.randn(3, 4)
    with probe.open(path, dtype="float32") as record:
        record.weights_held({"base": base}, 0, after="load")
        record.weights_held({"base": base + (wrong == "WGT010 of a base")}, 1, after="adapter step")
        live = {"q.lora_A.weight": a, "q.lora_B.weight": b}
        sent = {**live, "q.lora_A.weight": a + (wrong == "WGT013")}
        record.adapter_exported(sent, 1, live=live, scaling=2.0, live_scaling=2.0)
        record.weights_sent(1)
        with probe.attach(path) as engine:
            engine.engine_views(1, dict(list(sent.items())[: 1 if wrong == "TPT002 of an adapter" else 2]))


def merged(path: Path, wrong: str) -> None:
    """The same adapter, merged into what the engine gets."""
    folder = checkpoint(path.parent / "source")
    a, b, source = torch.randn(2, 8), torch.randn(VOCABULARY, 2), load_file(folder / "model.safetensors")
    base = source["head.weight"]
    scaling = 4.0 if wrong == "WGT018" else 2.0
    with probe.open(path, model=folder, dtype="float32") as record:
        record.weights_exported(source, 0)
        record.weights_exported({**source, "head.weight": base + scaling * b @ a}, 1)
        record.adapter_merged("head.weight", 1, base + scaling * b @ a, base=base, a=a, b=b, scaling=2.0)


def tuned(path: Path, wrong: str) -> None:
    """A step of fine-tuning."""
    with probe.open(path, dtype="float32") as record:
        text = "it is 7" if wrong == "DAT013 of the text in the loss" else "it is 7<eos>"
        record.trained_text(1, ids=["x"], responses=["it is 7"], texts=[text], end="<eos>")


def episodes(path: Path, wrong: str) -> None:
    """An episode of two turns, whose reply is no token in the loss."""
    with probe.open(path, dtype="float32") as record:
        record.rollouts(
            1,
            prompts=[[1, 2]],
            responses=[[3, END, 5, 6, 4, END]],
            ids=["x"],
            loss_mask=[[1, 1, int(wrong == "DAT006"), 0, 1, 1]],
            versions=[[0, 0, -1, -1, 0, 0]],
            engine_logprobs=[[-1.0, -1.0, float("nan"), float("nan"), -1.0, -1.0]],
        )
        first = {"prompt": [1, 2], "sampled": [3, END], "text": "1+1=", "reply": [5, 6], "said": "2"}
        second = {"prompt": [1, 2, 3, END, 5, 6], "sampled": [4, END], "text": "so 2"}
        record.turns(1, [[first, second]], max_turns=2, end_token=END)


def requests(path: Path, wrong: str) -> None:
    """A request that is asked twice with its seed, and an engine that was started again."""
    with probe.open(path, dtype="float32") as record:
        record.weights_exported({"a": torch.ones(2)}, 1)
        record.engine_restarted(1)
        record.samples(
            1,
            prompts=[[1, 2]] * 40,
            responses=[[3, 4], [5 if wrong == "LGP018" else 3, 4]] * 20,
            logprobs=[[-1.0, -1.0]] * 40,
            seeds=[at // 2 for at in range(40)],
            end_token=END,
            max_response_tokens=2,
            finish_reasons=["length"] * 40,
        )
        with probe.attach(path) as engine:
            engine.engine_views(1, {"a": torch.full((2,), 2.0 if wrong == "ENG001 after a restart" else 1.0)})


def idle(path: Path, wrong: str) -> None:
    """A step with a rate of 0."""
    with probe.open(path, dtype="float32") as record:
        record.weights_held({"a": torch.ones(2)}, 0, after="load")
        record.weights_held({"a": torch.ones(2) + (wrong == "WGT010 after an idle step")}, 0, after="idle step")


def megatron(path: Path, wrong: str) -> None:
    """The configuration of a trainer on megatron-core."""
    with probe.open(path, dtype="float32") as record:
        record.model_config(CONFIG)
        record.megatron_config(SimpleNamespace(hidden_size=16 if wrong == "LGP007" else 8, num_layers=1, **MEGATRON))


MEGATRON = {
    "position_embedding_type": "rope",
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "kv_channels": 4,
    "layernorm_epsilon": 1e-6,
    "vocab_size": 23,
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
}
OTHERS = {
    "WGT002": ranks,
    "WGT006": ranks,
    "PCK003": ranks,
    "WGT010 of a base": adapters,
    "WGT013": adapters,
    "TPT002 of an adapter": adapters,
    "WGT018": merged,
    "DAT013 of the text in the loss": tuned,
    "DAT006": episodes,
    "LGP018": requests,
    "ENG001 after a restart": requests,
    "WGT010 after an idle step": idle,
    "LGP007": megatron,
}
"""Check -> loop of its own, with what is wrong in it."""
BY_THE_ORACLE = {"LGP001", "LGP002", "LGP003", "LGP004", "LGP012", "LGP014", "LSS001", "LSS002", "TRN001"}
"""Those of tests/dist/test_own_loop.py and test_float32_loop.py, whose oracle has a process of its own."""


@pytest.mark.parametrize("fault", OTHERS)
def test_a_loop_of_another_kind_is_judged(fault: str, tmp_path: Path) -> None:
    for wrong in ("", fault):
        path = tmp_path / (wrong or "right") / "trace"
        path.parent.mkdir()
        torch.manual_seed(0)
        OTHERS[fault](path, wrong)
        found = {item.code: item for item in report_of(read(path), "trace").outcomes}
        outcome = found[fault[:6]]
        assert outcome.verdict is (Verdict.VIOLATED if wrong else Verdict.HOLDS), outcome


def test_every_check_of_the_table_is_seen_to_judge() -> None:
    judging = {code for code, item in REGISTRY.items() if judges_loops(item)}
    assert judging == {fault[:6] for fault in (*FAULTS, *OTHERS)} | BY_THE_ORACLE | {"PLN001"}
