"""The lines of docs/probe.md for other trainers' call shapes, run on tensors of those shapes.

What this does not exercise: the trainers themselves, whose versions may change what their functions are given.
"""

import re
from types import SimpleNamespace

import pytest
import torch

import verifier.checks  # noqa: F401 - fills the registry
from tests.meta import probe_table
from tests.meta.sources import ROOT
from verifier import probe
from verifier.core.finding import Verdict
from verifier.core.store import read
from verifier.report import report_of

PAGE = (ROOT / "docs/probe.md").read_text()


def snippet(begins):
    """The block of code under the paragraph that begins so."""
    found = re.search(rf"^{re.escape(begins)}.*?```python\n(.*?)```", PAGE, re.M | re.S)
    assert found is not None, begins
    return found[1]


def report(path):
    return report_of(read(path), str(path))


WEIGHTS = {"a.weight": torch.randn(4, 2), "b.weight": torch.randn(3).bfloat16(), "c.weight": torch.randn(2, 2)}


@pytest.fixture
def record(tmp_path):
    with probe.open(tmp_path / "trace", dtype="float32") as found:
        yield found


def test_chunks_with_metadata(record):
    pairs = [*WEIGHTS.items()]
    chunks = [
        SimpleNamespace(names=[name for name, _ in part], tensors=[tensor for _, tensor in part])
        for part in (pairs[:2], pairs[2:])
    ]
    exec(snippet("SkyRL:"), {"extract_weights": lambda: iter(chunks), "record": record, "version": 1})
    exec(snippet("NeMo-RL:"), packed() | {"record": record, "version": 1})
    record.weights_sent(1)
    record.close()
    assert report(record.path).verdict is Verdict.HOLDS


def packed():
    parts, table, begin = [], [], 0
    for name, tensor in WEIGHTS.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        size = -(-raw.numel() // 8) * 8
        parts.append(torch.nn.functional.pad(raw, (0, size - raw.numel())))
        table.append((name, tensor.shape, tensor.dtype, begin, begin + raw.numel()))
        begin += size
    return {"packed": torch.cat(parts), "packing": table}


def test_a_generator_that_passes_on_and_a_padded_batch(record):
    taken = {}
    nats = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, -0.25, -3.0]])
    batch = {
        "prompts": torch.tensor([[0, 0, 5], [0, 6, 7]]), "responses": torch.tensor([[8, 9, 0], [3, 2, 1]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]), "old_log_probs": nats, "rollout_log_probs": nats.clone(),
    }  # fmt: skip
    rollout = SimpleNamespace(update_weights=taken.update)
    names = {"batch": batch, "pad": 0, "per_tensor_param": (pair for pair in WEIGHTS.items()), "rollout": rollout}
    exec(snippet("verl:"), names | {"record": record, "step": 1, "version": 1})
    record.close()
    assert taken.keys() == WEIGHTS.keys()
    outcomes = report(record.path).outcomes
    assert {item.code: item.verdict for item in outcomes} == {"LGP009": Verdict.HOLDS, "WGT016": Verdict.HOLDS}


def test_a_weight_transfers_iterator_is_wrapped(record):
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    wire = []
    update_info = {
        "names": [*WEIGHTS], "dtype_names": [str(tensor.dtype).split(".")[-1] for tensor in WEIGHTS.values()],
        "shapes": [list(tensor.shape) for tensor in WEIGHTS.values()],
    }  # fmt: skip
    group = SimpleNamespace(broadcast=lambda tensor, **_: wire.append(tensor))
    names = {"named_tensors": iter(WEIGHTS.items()), "update_info": update_info, "version": 1}
    names["trainer_args"] = {"group": group, "stream": object()}
    exec(snippet("The sender's side"), names | {"record": record, "NCCLWeightTransferEngine": NCCLWeightTransferEngine})
    with probe.attach(record.path) as engine:
        engine.weights_received(zip(WEIGHTS, wire, strict=True), 1)
    record.close()
    assert report(record.path).verdict is Verdict.HOLDS


def test_samples_with_all_tokens(record):
    samples = [
        SimpleNamespace(
            tokens=[1, 2, 3 + at, 4], response_length=2, loss_mask=[1, 1], rollout_log_probs=[-1.0, -0.5], reward=1.0,
            group=0,
        )
        for at in range(2)
    ]  # fmt: skip
    exec(snippet("slime:"), {"samples": samples, "record": record, "step": 1})
    record.trainer_logprobs(1, [[-1.0, -0.5]] * 2)
    record.close()
    assert report(record.path).verdict is Verdict.HOLDS


def test_the_table_of_checks_is_drawn_from_what_they_need():
    """`python -m tests.meta.probe_table` draws it anew."""
    assert probe_table.drawn(PAGE) == PAGE


def test_the_table_names_calls_that_are_there():
    calls = {call for call in probe_table.CALLS if call != "judge --oracle"}
    assert {call for call in calls if not hasattr(probe.LoopRecorder, call)} == set()


def test_undertakings_of_the_page_are_those_of_the_code():
    for name in re.findall(r"^\| `(\w+)\(", PAGE, re.M):
        assert hasattr(probe.LoopRecorder, name), name
