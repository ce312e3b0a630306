"""LGP001 and LGP002 where two of trainer, engine and oracle agree: the third is suspect."""

from __future__ import annotations

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import change, having, make_trace
from verifier.core.check import REGISTRY, run_check
from verifier.core.comparison import Comparison
from verifier.core.record import Record
from verifier.stages.logprob.records import OracleLogprobs, TrainerLogprobs
from verifier.stages.rollout.records import EngineLogprobs

WRONG = having(array="wrong")


def first(code: str, records: list[Record]) -> Comparison:
    finding = run_check(REGISTRY[code], make_trace(records)).finding
    assert finding is not None
    return finding.first


@pytest.mark.parametrize("code", ["LGP001", "LGP002"])
def test_an_oracle_that_stands_alone_is_suspect(code: str) -> None:
    found = first(code, change(OracleLogprobs, WRONG))
    assert found.sentence.endswith("trainer and engine agree within 0: suspect the fp32 oracle")
    assert found.owner == "the fp32 oracle (transformers)"
    assert "whether transformers reads all of config.json" in found.hint


@pytest.mark.parametrize(("code", "kind"), [("LGP001", TrainerLogprobs), ("LGP002", EngineLogprobs)])
def test_a_side_that_stands_alone_is_not_excused(code: str, kind: type[Record]) -> None:
    found = first(code, change(kind, WRONG))
    assert "suspect" not in found.sentence
    assert "oracle" not in found.owner


def test_without_an_engine_nobody_is_suspect() -> None:
    alone = [item for item in change(OracleLogprobs, WRONG) if not isinstance(item, EngineLogprobs)]
    assert "suspect" not in first("LGP001", alone).sentence
