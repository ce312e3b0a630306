"""The pages about training name metrics and knobs that exist, and all metrics.

What this does not exercise: that a run writes these metrics and no others (tests/dist read some of them from runs).
"""

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.meta.sources import ROOT
from verifier.config import CONFIGS
from verifier.knob import entries
from verifier.trainer.metrics import RATES, STAGES

EMITTERS = {
    "generation.py": ("evaluate", "_evaluated"), "grpo_plan.py": ("updates", "_facts", "_token_counts"),
    "loop.py": ("_step", "run", "_evaluate"), "sampled_batch.py": ("facts",),
    "metrics.py": ("add", "facts", "mismatch_facts", "mismatch_trend"),
    "update_facts_megatron.py": ("metrics_of_update",), "worker_megatron.py": ("train",),
}  # fmt: skip
"""File of verifier/trainer -> functions that name metrics: keys of a dict, or in the head of a loop over them."""
COLUMNS = {"divisor", "advantage", "reference"}
"""Keys in those functions that name columns of a batch."""
KNOBS = {entry.key: entry.knob.choices for entry in entries(CONFIGS["train"])}
GROUPS = sorted({key.split(".")[0] for key in KNOBS if "." in key})
PAGES = ("training", "training-data", "metrics", "async-training", "scaling-out", "checkpoints")


def table_keys(page: str) -> list[str]:
    """Names in backticks that begin a row of a page's tables."""
    return re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.MULTILINE)


def emitted() -> Iterator[str]:
    """Keys of metrics that the trainer's code names, in the emitters and in each dict that becomes `self.facts`."""
    yield from RATES
    for path in sorted((ROOT / "verifier" / "trainer").glob("*.py")):
        nodes, names = list(ast.walk(ast.parse(path.read_text()))), EMITTERS.get(path.name, ())
        functions = [item for item in nodes if isinstance(item, ast.FunctionDef) and item.name in names]
        assert bool(functions) == bool(names), path.name
        facts = [item.value for item in nodes if isinstance(item, ast.Assign) and _is_facts(item.targets[0])]
        for node in (node for root in (*functions, *facts) for node in ast.walk(root)):
            yield from (
                item.value for item in _named(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)
            )


def _named(node: ast.AST) -> Iterable[ast.AST | None]:
    """Expressions that a node names keys by."""
    if isinstance(node, ast.Dict):
        return node.keys
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return [node.slice]
    return ast.walk(node.iter) if isinstance(node, ast.For) else ()


def _is_facts(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == "facts"


def test_metrics_page_has_every_metric_and_no_other():
    found = set(emitted()) - COLUMNS
    assert sorted(found ^ set(table_keys("metrics"))) == []
    assert sorted(set(STAGES) - found) == []


def test_knobs_beside_those_of_other_trainers_exist():
    rows = table_keys("coming-from")
    aggregations = KNOBS["aggregation"]
    pairs = [row.partition("=") for row in rows if row not in aggregations]
    assert [key for key, _, _ in pairs if key not in KNOBS] == []
    odd = [f"{key}={value}" for key, _, value in pairs if value and KNOBS[key] and value not in KNOBS[key]]
    assert odd == []
    assert set(aggregations) <= set(rows)


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_knobs_that_exist(page):
    """Words in backticks that begin as a group of knobs does."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.findall(rf"`((?:{'|'.join(GROUPS)})\.[a-z_0-9]+)[=`]", text)
    assert [key for key in found if key not in KNOBS] == []
