"""Contents of the engine after loading: checkpoint tensors, buffers and derived tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product

from verifier.checks.content import by_name, compare_contents
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.records_engine import (
    CheckpointView,
    ColdSettings,
    ColdTensor,
    ExpectedView,
    LoadedNames,
    Poison,
    SyncedSettings,
    SyncedTensor,
)
from verifier.core.stage import Stage
from verifier.core.trace import Trace


@check("ENG001", needs=(CheckpointView, ExpectedView), scope="held")
def engine_tensor_differs(trace: Trace) -> Iterator[Comparison]:
    """After every sync each engine rank's live tensors, mapped back to checkpoint layout, are what was sent.

    What it checks: names both ways, dtypes, shapes and bits of every checkpoint slice that an engine rank holds,
    read from the tensors that its forward uses.
    Why it matters: reload bugs leave single layers half-processed, or loaded twice, without an error.
    Evidence: engine/view, engine/view-expected (the export cut to the engine rank's slice).
    Tolerance and its source: bitwise; loading copies.
    What it does not catch: buffers that no checkpoint tensor names (ENG002), and tensors that the engine quantised
    (ENG002, LGP002).
    References: vllm#42821, SkyRL#1680, prime-rl#2714, verl#7986.
    """
    for version, rank in product(trace.versions(CheckpointView), range(trace.manifest.engine_ranks)):
        yield from compare_contents(
            trace.of(CheckpointView, version=version, rank=rank), trace.of(ExpectedView, version=version, rank=rank),
            stage=Stage.ENGINE, version=version, actual_says=f"engine rank {rank}",
            expected_says="the export, cut to this rank", allowed="bitwise (loading copies)",
            hint="look at the engine's weight loader and at its processing after this version's reload",
        )  # fmt: skip


@check("ENG002", needs=(SyncedTensor, ColdTensor), scope="cold")
def engine_differs_from_cold(trace: Trace) -> Iterator[Comparison]:
    """The synced engine equals, bit for bit, an engine that loads the same weights cold.

    What it checks: per engine rank, every parameter, buffer (persistent or not) and derived tensor, at the version for
    which an engine was started cold; at every other version those buffers that no update loads, which are the same.
    Why it matters: rotary caches, scales and repacked weights are in no checkpoint; a reload can lose them.
    Evidence: engine/state and engine/cold of the same version.
    Tolerance and its source: bitwise; both hold a function of the same bits.
    What it does not catch: an engine that loads wrongly both cold and live (ENG001, LGP002).
    References: vllm#44371, vllm#16564, vllm#48284, RFC vllm#48312.
    """
    versions = sorted({*trace.versions(SyncedTensor), *trace.versions(ColdTensor)})
    for version, rank in product(versions, range(trace.manifest.engine_ranks)):
        cold = list(trace.of(ColdTensor, version=version, rank=rank))
        state = list(trace.of(SyncedTensor, version=version, rank=rank))
        if not cold:  # the buffers that no update brings, views of parameters apart
            loaded = _loaded(trace.of(LoadedNames, rank=rank))
            cold = [item for item in trace.of(ColdTensor, rank=rank, sort="buffer") if item.name not in loaded]
            kept = {item.name for item in cold}
            state = [item for item in state if item.name in kept]
        yield from compare_contents(
            state, cold,
            stage=Stage.ENGINE, version=version, actual_says=f"synced engine rank {rank}",
            expected_says="an engine that loaded them cold", allowed="bitwise (a function of the same bits)",
            hint="look at what the reload does with tensors that are in no checkpoint",
        )  # fmt: skip


def _loaded(reports: Iterable[LoadedNames]) -> set[str]:
    """Names that the engine's loader reported as loaded."""
    return {name for item in reports for name in item.names}


@check("ENG003", needs=(Poison,), scope="engine")
def poison_left_tensor_intact(trace: Trace) -> Iterator[Comparison]:
    """Before each sync the receiver was really poisoned, so that what it holds afterwards came from the sync.

    What it checks: of the engine's floating-point parameters and buffers, those that still held a finite value after
    the poison, per engine rank: none, but those that the engine declares it cannot reach.
    Why it matters: without poison a sync that skips a tensor leaves the right old value in place and passes.
    Evidence: engine/poison (the outcome of each tensor).
    Tolerance and its source: exact.
    What it does not catch: tensors that the engine never reads.
    References: prime-rl#2714, slime `--check-weight-update-equal`.
    """
    for item in trace.of(Poison):
        intact = [name for name, outcome in item.outcomes.items() if outcome == "left"]
        owner = f"engine rank {item.rank}"
        yield Comparison(
            what=intact[0] if intact else owner, same=not intact, stage=Stage.ENGINE, version=item.version,
            badness=1.0, owner=owner,
            sentence=f"`{', '.join(intact[:1])}` was still finite after the poison "
            f"({len(intact)} of {len(item.outcomes)} tensors were)",
            expected="every tensor NaN", actual=f"{len(intact)} finite", allowed="exact",
            hint="a tensor that poison cannot reach is one that a sync may not reach either",
        )  # fmt: skip


@check("ENG004", needs=(LoadedNames, SyncedTensor), scope="engine")
def engine_parameter_not_loaded(trace: Trace) -> Iterator[Comparison]:
    """At every sync the engine's own loader reported every parameter of the engine as loaded.

    What it checks: per engine rank, each parameter that the engine holds against what `load_weights` reported over all
    chunks of the update.
    Why it matters: a name that the loader does not know is skipped without an error, and vLLM drops the set that its
    loader returns.
    Evidence: engine/loaded, engine/state (parameters).
    Tolerance and its source: exact.
    What it does not catch: a parameter that was loaded with wrong contents (ENG001).
    References: vLLM `receive_weights`, prime-rl#2326, slime debugging guide.
    """
    for version, rank in product(trace.versions(LoadedNames), range(trace.manifest.engine_ranks)):
        loaded = _loaded(trace.of(LoadedNames, version=version, rank=rank))
        for held in trace.of(SyncedTensor, version=version, rank=rank, sort="parameter"):
            yield Comparison(
                what=held.name, same=held.name in loaded, stage=Stage.ENGINE, version=version, badness=1.0,
                sentence=f"engine rank {rank} never loaded its parameter `{held.name}`",
                owner=f"engine rank {rank}", expected="loaded once", actual="not reported by the loader",
                allowed="exact", hint="compare the received names with the engine's own mapping of names",
            )  # fmt: skip


@check("ENG005", needs=(SyncedSettings, ColdSettings), scope="settings")
def engine_setting_differs_from_cold(trace: Trace) -> Iterator[Comparison]:
    """The synced engine computes with the epsilons, scales, windows and flags that a cold one computes with.

    What it checks: per engine rank and module, every number, flag and name that is an attribute of the module or of
    an object that computes for it (attention backend, router), at every version, against an engine started cold.
    Why it matters: they are no tensors, so no update brings them and no comparison of contents sees them; a reload that
    builds or processes a layer anew can take a default instead, and a wrong epsilon hides below any noise.
    Evidence: engine/settings, engine/cold-settings.
    Tolerance and its source: exact; a reload changes weights and nothing else.
    What it does not catch: a setting that is wrong in a cold engine too (LGP002), and values in closures. What a cold
    engine has not is not judged: a forward that does without it does not read it. On GPUs it has no subject yet.
    References: vllm#44371, vllm#48284, RL#1046, slime#1734.
    """
    for rank, version in product(range(trace.manifest.engine_ranks), trace.versions(SyncedSettings)):
        live = by_name(trace.of(SyncedSettings, version=version, rank=rank))
        for module, cold in by_name(trace.of(ColdSettings, rank=rank)).items():
            got, want = live[module].values if module in live else {}, cold.values
            other = [name for name in want if got.get(name) != want[name]]
            if not other:
                yield Comparison(what=module, same=True, stage=Stage.ENGINE, version=version)
                continue
            name = f"{module}.{other[0]}"
            is_there, was_there = got.get(other[0], "absent"), want[other[0]]
            yield Comparison(
                what=name, same=False, stage=Stage.ENGINE, version=version, badness=1.0, owner=f"engine rank {rank}",
                sentence=f"`{name}` is {is_there} in the synced engine and {was_there} in one that loaded cold",
                expected=f"{was_there} (an engine that loaded cold)", actual=f"{is_there} (synced engine rank {rank})",
                mismatched=f"{len(other)} of the {len(want)} settings of this module",
                allowed="exact (a reload changes weights and nothing else)",
                hint="look at what the reload builds or processes anew in this module",
            )  # fmt: skip


@check("ENG006", needs=(CheckpointView, ExpectedView), scope="held")
def engine_part_held_by_no_rank(trace: Trace) -> Iterator[Comparison]:
    """Together the engine's ranks hold all of every tensor.

    What it checks: of each tensor, and each place that holds it, the parts that the engine's ranks say they hold: the
    elements of the different parts add up to the elements of the whole.
    Why it matters: a rank that takes itself for another loads that one's part, and holds exactly what it asked for.
    Evidence: engine/view (parts), engine/view-expected (whole shapes).
    Tolerance and its source: exact counts.
    What it does not catch: a part whose contents are wrong (ENG001).
    References: vllm-gguf-plugin#103, vllm#56949, SkyRL#1399.
    """
    for version in trace.versions(CheckpointView):
        wholes = {item.name: item.whole for item in trace.of(ExpectedView, version=version)}
        parts: dict[tuple[str, str], set[tuple[tuple[int, int], ...]]] = defaultdict(set)
        for item in trace.of(CheckpointView, version=version):
            if item.tensor in wholes:
                parts[item.tensor, item.holder].add(item.box)
        for (name, holder), boxes in parts.items():
            whole = math.prod(wholes[name])
            held = sum(math.prod(end - begin for begin, end in box) for box in boxes)
            yield Comparison(
                what=name, same=held == whole, stage=Stage.ENGINE, version=version, badness=1.0,
                sentence=f"the engine's ranks together hold {held:,} of the {whole:,} elements of `{name}`",
                expected=f"{whole:,} elements",
                actual=f"{held:,} elements, in {len(boxes)} different parts of `{holder}`",
                allowed="exact counts", hint="look at the rank and the sizes by which each engine rank cuts this layer",
            )  # fmt: skip
