"""Contents of an engine between syncs: after it answered, and keys that a sync leaves."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.checks.conditions import AWAKE, SYNCED, WEIGHTS_SENT
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_set, compare_value
from verifier.core.condition import condition, knob, on, recorded
from verifier.core.records_weights import EngineServed, KeptKeys


@check("ENG009", needs=(EngineServed,), applies=on(step=SYNCED & AWAKE, loop=recorded(EngineServed)))
def engine_changed_while_it_served(trace: Trace) -> Iterator[Comparison]:
    """An engine holds the same as a sync begins as it held after the sync before.

    What it checks: per engine rank, every parameter, buffer and derived tensor, as it is asked before each sync of a
    training run, against what it held right after the last one; before the first, against what it held at its start.
    Why it matters: an engine that reads its checkpoint once more when it wakes, or multiplies an adapter by its factor
    at each use, held the right weights when the sync was judged, and answered by others.
    Evidence: engine/served.
    Tolerance and its source: bitwise; answering changes no weights.
    Where to look: what loads, wakes or rescales weights between a sync and the requests after it.
    What it does not catch: what is changed and put back before the next sync (LGP009); engines that sleep between
    syncs, which are not asked; settings (ENG005).
    References: trl#5312, trl#5355, SkyRL#2250, unsloth-zoo#941.
    """
    for item in trace.of(EngineServed):
        changed, owner = [each.name for each in item.changed], f"engine rank {item.rank}"
        subject = f"tensors that changed while {owner} answered by version {item.version}"
        yield compare_set(
            item, next(iter(changed), owner), changed, total=item.num_tensors, subject=subject, owner=owner
        )


KEYS_DROPPED = condition("requests keep their keys at a sync", lambda run: not knob(run, "grpo.keep_kv_cache"))


@check("ENG010", needs=(KeptKeys,), applies=on(step=SYNCED & WEIGHTS_SENT & KEYS_DROPPED, loop=recorded(KeptKeys)))
def keys_outlive_their_weights(trace: Trace) -> Iterator[Comparison]:
    """No engine goes on from keys and values of older weights after a sync.

    What it checks: of each sync of a training run that sends weights, and of each engine, counted in its process right
    after the sync: the blocks in which its prefix cache would look for a prompt, and the tokens of running requests
    whose keys it has. None of either, unless requests that ran were to keep theirs (`grpo.keep_kv_cache`).
    Why it matters: a prompt that comes again, a system message that all prompts begin with, and requests that run on
    are then read by keys of weights that are gone. In bf16 that is less than the noise of a token.
    Evidence: engine/kept-keys.
    Tolerance and its source: exact; a sync is to empty the cache.
    Where to look: what resets the prefix cache at a sync, and what it answers.
    What it does not catch: a prefix that is cached under a name that later weights have too, where the engine gets
    adapters (LGP011 names them); what `grpo.keep_kv_cache` leaves behind after the requests that ran.
    References: RL#4018, prime-rl#1650, RL#3152, lmdeploy#4917.
    """
    for item in trace.of(KeptKeys):
        pairs = () if item.kept else zip(item.blocks, item.tokens, strict=True)
        for engine, (blocks, tokens) in enumerate(pairs):
            found = f"{blocks:,} blocks of keys for new prompts and {tokens:,} tokens of running requests"
            at, what = At(Stage.ROLLOUT, item.version, f"engine {engine}"), f"engine {engine}"
            sentence = f"{what} has {found} after the sync of version {item.version}, by older weights"
            yield compare_value(at, what, found, "none", same=not blocks and not tokens, sentence=sentence)
