"""The sender's side of recorded transfers: the plan, what is held to it, and the call shapes of vLLM's senders.

What this does not exercise: "ipc", which needs a GPU to export memory, and a broadcast between processes.
"""

import gc
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

import verifier.checks  # noqa: F401 - fills the registry
from verifier import probe
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.core.store import read
from verifier.errors import ContractError, UsageError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.report import report_of
from verifier.stages.plan.records import PlanDigest
from verifier.stages.transport.records import Handover


def weights(seed=0):
    made = torch.Generator().manual_seed(seed)
    return {f"layers.{at}.weight": torch.randn(4, 3, generator=made) for at in range(3)}


def stream(tensors):
    yield from tensors.items()


def told(tensors):
    return {
        "names": [*tensors],
        "dtype_names": [str(tensor.dtype).split(".")[-1] for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def receive(record, pairs, version):
    with probe.attach(record.path) as engine:
        for pair in pairs:
            engine.weights_received([pair], version)


def report(path):
    return report_of(read(path), str(path))


def verdicts(path):
    return {item.code: item.verdict for item in report(path).outcomes}


def broadcast(record, sent, tensors, version):
    """VLLM's own sender of its "nccl" engine, one tensor after another, into memory in place of a communicator."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

    wire = []
    group = SimpleNamespace(broadcast=lambda tensor, **_: wire.append(tensor))
    given = NCCLTrainerSendWeightsArgs(group=group, stream=object())
    NCCLWeightTransferEngine.trainer_send_weights(iterator=sent, trainer_args=given)
    receive(record, zip(told(tensors)["names"], wire, strict=True), version)


def until_it_stops(record, sent, tensors, version):
    """As the packed broadcast draws."""
    wire = []
    while True:
        try:
            wire.append(next(sent))
        except StopIteration:
            break
    receive(record, wire, version)


def one_by_one(record, sent, tensors, version):
    """As "ipc" draws."""
    receive(record, [(name, tensor.detach().contiguous()) for name, tensor in sent], version)


@pytest.mark.parametrize("given", [dict, stream])
@pytest.mark.parametrize("send", [broadcast, until_it_stops, one_by_one])
def test_senders_draw_the_same_tensors_and_all_holds(tmp_path, send, given):
    with probe.open(tmp_path / "trace") as record:
        for version in range(3):
            tensors = weights(version)
            sent = record.sending(given(tensors), version, live=tensors, told=told(tensors))
            send(record, sent, tensors, version)
    found = verdicts(tmp_path / "trace")
    assert {"PLN001", "TPT001", "TPT002", "WGT005", "WGT008"} <= found.keys()
    assert set(found.values()) == {Verdict.HOLDS}
    assert len(list(read(tmp_path / "trace").of(PlanDigest))) == 3


def test_the_very_tensors_pass(tmp_path):
    tensors = weights()
    with probe.open(tmp_path / "trace") as record:
        passed = dict(record.sending(stream(tensors), 1))
    assert all(passed[name] is tensor for name, tensor in tensors.items())
    assert [*passed] == [*tensors]


@pytest.mark.parametrize("given", [dict, stream])
@pytest.mark.parametrize(
    "fault",
    [
        lambda name, tensor: (f"model.{name}", tensor),
        lambda name, tensor: (name, tensor.bfloat16()),
        lambda name, tensor: (name, tensor.bfloat16().float()),
        lambda name, tensor: (name, tensor.mT.contiguous()),
    ],
    ids=["renamed", "cast", "rounded", "transposed"],
)
def test_a_fault_behind_the_sender_is_seen_in_the_transport(tmp_path, fault, given):
    with probe.open(tmp_path / "trace") as record:
        sent = record.sending(given(weights()), 1)
        receive(record, [fault(*pair) if at == 1 else pair for at, pair in enumerate(sent)], 1)
    found = report(tmp_path / "trace")
    assert [item.code for item in found.violated] == ["TPT001"]
    assert found.violated[0].finding.first_bad_stage is Stage.TRANSPORT


def other(tensors, fault):
    a, b, c = tensors.items()
    return dict({
        "order": [b, a, c], "renamed": [a, ("other", b[1]), c], "cast": [a, (b[0], b[1].bfloat16()), c],
        "left out": [a, b], "one more": [a, b, c, ("more", c[1])],
    }[fault])  # fmt: skip


SAYS = {
    "order": "tensor 0 is `layers.1.weight`", "renamed": "tensor 1 is `other`", "cast": "bfloat16",
    "left out": "2 tensors came, the plan has 3: next `layers.2.weight`",
    "one more": "`more` comes after the last of 3",
}  # fmt: skip


@pytest.mark.parametrize("fault", SAYS)
@pytest.mark.parametrize("given", [dict, stream])
@pytest.mark.parametrize("planned_by", ["the first transfer", "told"])
def test_what_departs_from_the_plan_is_stopped_and_said(tmp_path, planned_by, given, fault):
    came, changed = [], other(weights(2), fault)
    with probe.open(tmp_path / "trace") as record:
        if planned_by != "told":
            receive(record, record.sending(weights(1), 1), 1)
        says = told(weights()) if planned_by == "told" else None
        with pytest.raises(ContractError, match=SAYS[fault]):
            came.extend(name for name, _ in record.sending(given(changed), 2, told=says))
    assert given is stream or not came
    assert came == [*weights()][: len(came)]
    found = verdicts(tmp_path / "trace")
    assert found["TPT002"] is Verdict.VIOLATED
    if planned_by != "told" and given is dict:
        assert found["PLN001"] is Verdict.VIOLATED


def test_ranks_that_plan_differently_are_seen(tmp_path):
    path = tmp_path / "trace"
    first, second = (probe.open(path, rank=rank, world_size=2) for rank in range(2))
    receive(first, first.sending(weights(1), 1), 1)
    for _ in second.sending(other(weights(1), "order"), 1):
        pass
    first.close()
    second.close()
    found = report(path)
    assert [item.code for item in found.violated] == ["WGT006", "PLN001"]
    assert found.violated[0].finding.first_bad_stage is Stage.EXPORT


def test_a_plan_is_compared_with_the_checkpoint(tmp_path):
    checkpoint = write_tiny("qwen3", tmp_path)
    source = open_checkpoint(checkpoint)
    tensors = {name: source.read(name) for name in source.names()}
    for name, dtype in (("same", torch.float32), ("cast", torch.bfloat16)):
        with probe.open(tmp_path / name, model=checkpoint) as record:
            tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
            receive(record, record.sending(tensors, 0), 0)
    assert set(verdicts(tmp_path / "same").values()) == {Verdict.HOLDS}
    assert verdicts(tmp_path / "cast")["PLN002"] is Verdict.VIOLATED


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_sender_that_stops_is_seen(tmp_path, count):
    with probe.open(tmp_path / "trace") as record:
        receive(record, islice(record.sending(weights(1), 1), count), 1)
        gc.collect()
    refused = [item.refused for item in read(tmp_path / "trace").of(Handover)]
    assert refused == ["" if count == 3 else f"the sender stopped after {count} of 3 tensors"]


def test_an_error_of_the_stream_passes_and_is_said(tmp_path):
    def broken():
        yield "layers.0.weight", torch.zeros(2)
        raise RuntimeError("a rank is gone")

    record = probe.open(tmp_path / "trace")
    with pytest.raises(RuntimeError):
        list(record.sending(broken(), 1))
    record.close()
    assert [item.refused for item in read(tmp_path / "trace").of(Handover)] == ["RuntimeError: a rank is gone"]


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda record: (record.weights_exported(weights(), 1), record.sending(weights(), 1)), "was exported or sent"),
        (lambda record: (record.sending(weights(), 1), record.sending(weights(), 1)), "was exported or sent"),
        (
            lambda record: record.sending(weights(), 1, told={"names": ["a"]}),
            "`told` has names, dtype_names and shapes",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused(tmp_path, act, says):
    with pytest.raises(UsageError, match=says):
        act(probe.open(tmp_path / "trace"))


def test_a_plan_that_cannot_be_is_refused(tmp_path):
    record = probe.open(tmp_path / "trace")
    with pytest.raises(ContractError, match="stands twice"):
        record.sending([*weights().items(), *weights().items()], 1)
