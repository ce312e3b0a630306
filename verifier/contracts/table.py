"""The contracts, one row each: which package keeps it, and which checks rest on it. Loads nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verifier.platform import Tier
from verifier.platform.upstream_fixes import TRANSFORMERS_SCAN, VLLM_BUFFERS, VLLM_HEADS, VLLM_LATENT, VLLM_SLEEP

BOTH: tuple[Tier, ...] = ("cpu", "cuda")
_SHARDS = ("WGT001", "WGT002", "WGT004", "WGT005", "WGT006")
_TRAINED = ("LGP001", "LGP009", "LSS001", "LSS002", "TRN001", "TRN005")
_SYNCED = ("ENG001", "ENG002", "LGP002", "LGP003")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One thing that upstream does, and that a function of a module of this package asserts."""

    name: str
    """Name of the function."""
    module: str = ""
    """Module of this package; the functions of one module share a process, in the order of the table."""
    package: str = ""
    """Distribution that keeps it, as the pins name it; `vllm` stands for either build."""
    checks: tuple[str, ...] = ()
    """Codes of the checks that rest on it: without it, none of them holds."""
    bug: str = ""
    """Upstream's number or place of a bug that the function shows. No check rests on one: without it, a fix can go."""
    fix: str = ""
    """Id of the fix that it shows to work. No check rests on a fix: each judges what a fix left."""
    tiers: tuple[Tier, ...] = BOTH
    gone_in: tuple[str, ...] = ()
    """Verified sets in which it does not hold, as docs/upstream.md states; never one on which checks rest."""

    @property
    def resting(self) -> str:
        """Codes of the checks, or the fix, that rest on it."""
        return f"the fix {self.fix}" if self.fix else " ".join(self.checks)


def _of(module: str, package: str, *rows: Contract) -> tuple[Contract, ...]:
    return tuple(replace(row, module=module, package=row.package or package) for row in rows)


def _keeps(name: str, *checks: str, tiers: tuple[Tier, ...] = BOTH, package: str = "") -> Contract:
    return Contract(name=name, package=package, checks=checks, tiers=tiers)


def _mends(name: str, fix: str, gone_in: tuple[str, ...] = ()) -> Contract:
    return Contract(name=name, fix=fix, gone_in=gone_in)


def _has(name: str, bug: str, tiers: tuple[Tier, ...] = BOTH, gone_in: tuple[str, ...] = ()) -> Contract:
    return Contract(name=name, bug=bug, tiers=tiers, gone_in=gone_in)


CPU: tuple[Tier, ...] = ("cpu",)
VLLM_022 = ("vllm-0.22",)
CONTRACTS = (
    *_of(
        "platform_megatron",
        "megatron-core",
        _keeps("platform_installs", *_SHARDS, *_TRAINED, tiers=CPU),
        _keeps("calls_take_what_rooms_pass", *_SHARDS, *_TRAINED),
        _keeps("reference_modules_mirror_upstream", *_TRAINED, tiers=CPU),
        _keeps("the_rest_is_taken_by_megatrons_own_linears", *_TRAINED, tiers=CPU),
        _keeps("specs_name_the_reference_modules", *_TRAINED, tiers=CPU),
        _keeps("bridge_knows_the_sharding_of_every_reference_module", *_SHARDS, tiers=CPU, package="megatron-bridge"),
        _keeps("ranks_are_laid_out_as_the_mesh_says", *_SHARDS, "PCK003"),
        _keeps("layers_are_shared_out_as_the_mesh_says", *_SHARDS),
        _has("token_counts_on_the_host_are_not_made_numpy_upstream", "moe_utils.maybe_move_tensor_to_cpu", CPU),
        _has("norms_of_large_tensors_are_short_upstream", "local_multi_tensor_l2_norm without Transformer Engine", CPU),
        _keeps("guards_tell_tensors_of_another_kind", "TPT001", package="torch"),
        _keeps("torch_itself_is_whole", *_TRAINED, tiers=CPU, package="torch"),
        _keeps("placeholder_gives_nothing_away", *_TRAINED, tiers=CPU),
    ),
    *_of(
        "reload_vllm",
        "vllm",
        _has("reload_spoils_an_alias_of_a_childs_weight", "vllm #42481", gone_in=VLLM_022),
        _has("reload_spoils_a_buffer_that_nobody_loads", "vllm #44371"),
        _has("transforming_loader_is_counted_twice", "prime-rl #2714"),
        _has("reload_leaves_the_packed_copy_of_a_tied_head", "vLLM's packed copy of a tied head"),
        _has("derived_matrices_are_bound_to_new_memory", "vllm #48251"),
        _mends("derived_matrices_of_bf16_are_views", VLLM_LATENT),
        _has("sleep_fails_when_others_take_memory", "vllm #45620"),
        _mends("fix_keeps_buffers_and_aliases", VLLM_BUFFERS, VLLM_022),
        _mends("fix_packs_a_tied_head_again", VLLM_HEADS),
        _mends("fix_keeps_the_memory_of_derived_matrices", VLLM_LATENT),
        _mends("loading_the_same_twice_changes_nothing", VLLM_BUFFERS, VLLM_022),
        _mends("fix_lets_others_take_memory", VLLM_SLEEP),
    ),
    *_of(
        "held_views_vllm",
        "vllm",
        _has("views_are_kept_until_the_layer_is_complete", "layerwise reload keeps views of what it was given"),
        _keeps("what_was_let_go_is_loaded_right", *_SYNCED),
    ),
    *_of(
        "transfer_vllm",
        "vllm",
        _keeps("factory_makes_our_engine", *_SYNCED),
        _keeps("worker_takes_what_ours_passes", *_SYNCED),
        _keeps("our_engine_takes_what_the_worker_passes", *_SYNCED),
    ),
    *_of(
        "forward_hf",
        "transformers",
        _has("transformers_loses_the_state_between_chunks", "transformers #47246"),
        _mends("an_engine_has_the_fix_of_the_state", TRANSFORMERS_SCAN),
        _keeps("the_oracle_keeps_the_state", "LGP001", "LGP002", "LGP003", "LSS001"),
        _keeps("the_oracle_raises_no_time_step", "LGP001", "LGP002", "LGP003", "LSS001"),
    ),
)


def contracts_of(tier: Tier) -> tuple[Contract, ...]:
    """The contracts of a tier."""
    return tuple(item for item in CONTRACTS if tier in item.tiers)


def by_module(contracts: Sequence[Contract]) -> dict[str, list[Contract]]:
    """Contracts by the process that looks at them."""
    found: dict[str, list[Contract]] = {}
    for item in contracts:
        found.setdefault(item.module, []).append(item)
    return found
