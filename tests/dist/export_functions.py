"""What test_export_names.py runs on ranks."""

from __future__ import annotations

from verifier.launch.rank import RankContext
from verifier.model.provider_megatron import preload
from verifier.platform.upstream_fixes import MEGATRON_DECAY


def preload_cpu() -> None:
    """Import Megatron once, before ranks are forked."""
    preload("cpu")


def compare_with_layout(context: RankContext) -> dict:
    """Build the real model on this rank and compare every local tensor with what the layout says, bit for bit."""
    import torch

    from verifier.export.names import layout_of
    from verifier.mesh import Mesh
    from verifier.model.checkpoint import open_checkpoint
    from verifier.model.provider_megatron import build

    mesh = Mesh(**context.args["mesh"])
    model = build(context.args["path"], mesh, dtype=context.args["dtype"], tier="cpu", fixes=[MEGATRON_DECAY])
    checkpoint = open_checkpoint(context.args["path"])
    layout = layout_of(checkpoint.config)
    num_compared, wrong = 0, []
    for index, chunk in enumerate(model.chunks):
        parameters = {_bare(name): tensor.detach() for name, tensor in chunk.named_parameters()}
        saved = {_bare(name) for name in chunk.state_dict()}
        buffers = {_bare(name): tensor for name, tensor in chunk.named_buffers() if _bare(name) in saved}
        actual = parameters | buffers
        placements = {item.param_name: item for item in layout.placements(mesh, context.rank, index)}
        wrong += [f"only one side has `{name}`" for name in sorted(actual.keys() ^ placements.keys())]
        for name in sorted(actual.keys() & placements.keys()):
            expected = placements[name].shard(checkpoint.read)
            num_compared += 1
            if (name in buffers) != placements[name].is_buffer:
                wrong.append(f"`{name}` is a buffer on one side and a parameter on the other")
            if actual[name].dtype != expected.dtype or not torch.equal(actual[name], expected):
                wrong.append(f"`{name}` differs")
    return {"num_compared": num_compared, "wrong": wrong}


def _bare(name: str) -> str:
    """A name without the prefixes of Megatron's wrappers (mixed precision, data parallelism)."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
