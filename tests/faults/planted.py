"""Bugs of gated delta nets, windows, soft caps and sinks, planted into megatron-core's layers; no catalogue has them.

A row is made as one of the catalogue is (`verifier.faults.fault`). `injected` is what ranks enter.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from verifier.core.stage import Stage
from verifier.faults import injection
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import NO_ENGINE, Body, Call, Fault
from verifier.mesh import Mesh

INJECTED = "tests.faults.planted:injected"
NET = "megatron.core.ssm.gated_delta_net"
RULE = (
    f"{NET}.gdn:chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, "
    "use_qk_l2norm_in_kernel, cu_seqlens)"
)
CONVOLVED = f"{NET}.gdn:causal_conv1d(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens)"
GATES = f"{NET}.common:_GDNBase._compute_g_and_beta(self, A_log_local_cp, dt_bias_local_cp, alpha, beta)"
NORMED = f"{NET}.common:_GDNBase._apply_gated_norm(self, x, gate)"
ATTEND = "verifier.platform.cpu_attention:_causal(query, key, value, positions, scale, rows_before, softcap, sinks)"
BENT = "megatron.bridge.models.gemma.gemma2_provider:logit_softcapping(logits, scale)"
CHUNK = 64
"""Rows that the kernels of flash-linear-attention take at a time."""
PLANTED: dict[str, Fault] = {}


def planted(target: str, *, among: dict[str, Fault] = PLANTED, **row: Any) -> Callable[[Body], Fault]:
    """A fault whose id is the function's name with dashes, and whose summary is its docstring."""

    def register(body: Body) -> Fault:
        name = body.__name__.replace("_", "-")
        fields: dict[str, Any] = {"stage": Stage.LOGPROB, "caught_by": ("LGP001",), "engine": NO_ENGINE, **row}
        among[name] = Fault(
            id=name, reproduces="none", summary=str(body.__doc__), replacements=[(target, body)], **fields
        )
        return among[name]

    return register


@contextlib.contextmanager
def injected(spec: Any, context: Any, fault_id: str, folder: str) -> Iterator[None]:
    """`verifier.faults.injection.injected`, which knows these faults too."""
    CATALOG.update(PLANTED)
    with injection.injected(spec, context, fault_id, folder):
        yield


DELTA: dict[str, Any] = {"model": "tiny:qwen3_5_text"}
IN_LOSS: dict[str, Any] = {**DELTA, "stage": Stage.LOSS, "caught_by": ("LSS001",)}


@planted(CONVOLVED, **DELTA)
def convolution_crosses_sequences(call: Call) -> Any:
    """The convolution reads the last rows of the sample before."""
    return call.faulty(cu_seqlens=None)


@planted(RULE, **DELTA)
def boundary_one_token_late(call: Call) -> Any:
    """A sample's state begins anew behind its first token."""
    ends = call.cu_seqlens.clone()
    ends[1:-1] += 1
    return call.faulty(cu_seqlens=ends)


@planted(RULE, **DELTA)
def last_boundary_lost(call: Call) -> Any:
    """The last sample of a pack goes on from the state of the one before."""
    ends = call.cu_seqlens
    return call.original() if len(ends) < 3 else call.faulty(cu_seqlens=torch.cat([ends[:-2], ends[-1:]]))


@planted(RULE, **DELTA)
def state_lost_at_chunk_edges(call: Call) -> Any:
    """Each chunk of 64 rows begins with an empty state."""
    ends = call.cu_seqlens.tolist()
    edges = {at for begin, end in itertools.pairwise(ends) for at in range(begin, end, CHUNK)}
    return call.faulty(cu_seqlens=call.cu_seqlens.new_tensor(sorted(edges | {ends[-1]})))


@planted(RULE, **DELTA)
def last_chunk_without_state(call: Call) -> Any:
    """The rows behind the last whole chunk of a sample do not see the state."""
    ends = call.cu_seqlens.tolist()
    tails = {end - (end - begin) % CHUNK for begin, end in itertools.pairwise(ends) if end - begin > CHUNK}
    return call.faulty(cu_seqlens=call.cu_seqlens.new_tensor(sorted({*ends, *tails})))


@planted(RULE, **DELTA)
def decay_missed_at_chunk_edges(call: Call) -> Any:
    """A state is handed from chunk to chunk without the decay of the chunk's first row."""
    kept = call.g.clone()
    for begin, end in itertools.pairwise(call.cu_seqlens.tolist()):
        kept[:, begin + CHUNK : end : CHUNK] = 0
    return call.faulty(g=kept)


@planted(RULE, **DELTA)
def state_kept_between_micro_batches(call: Call) -> Any:
    """A pack begins with the state that the micro-batch before it left in the layer's buffer."""
    now = {name: getattr(call, name) for name in ("q", "k", "v", "g", "beta")}
    before = call.state.get(now["k"].shape[2:])
    call.state[now["k"].shape[2:]] = {name: value[:, -8:].detach() for name, value in now.items()}
    if before is None:
        return call.original()
    rows = before["k"].shape[1]
    ends = call.cu_seqlens + rows
    ends[0] = 0
    found, state = call.faulty(
        cu_seqlens=ends, **{name: torch.cat([before[name], value], dim=1) for name, value in now.items()}
    )
    return found[:, rows:], state


@planted(RULE, **DELTA)
def queries_repeated_head_by_head(call: Call) -> Any:
    """Heads of queries and keys are tiled over those of values, where neighbours share one."""
    heads = call.q.shape[2]
    order = torch.arange(heads).view(2, -1).T.flatten()
    return call.faulty(q=call.q[:, :, order], k=call.k[:, :, order])


@planted(CONVOLVED, **DELTA)
def convolution_turned_around(call: Call) -> Any:
    """The convolution's weights are read from the last row to the first."""
    return call.faulty(weight=call.weight.flip(-1))


@planted(GATES, **DELTA)
def rate_of_decay_in_bfloat16(call: Call) -> Any:
    """The rate of the decay is rounded to bf16, before all tokens add it up."""
    return call.faulty(A_log_local_cp=call.A_log_local_cp.exp().bfloat16().float().log())


@planted(GATES, **DELTA)
def bias_behind_the_softplus(call: Call) -> Any:
    """The bias of the decay is added behind its softplus."""
    decay, rate = call.faulty(dt_bias_local_cp=torch.zeros_like(call.dt_bias_local_cp))
    return decay - call.A_log_local_cp.exp() * call.dt_bias_local_cp, rate


@planted(NORMED, **DELTA)
def gate_before_the_norm(call: Call) -> Any:
    """The output is gated before its norm, as in Mamba-2."""
    gate = call.gate.reshape(-1, call.gate.shape[-1])
    ones = torch.full_like(gate, 1.2784645)  # SiLU of which is 1
    return call.faulty(x=call.x.reshape(gate.shape) * functional.silu(gate), gate=ones)


@planted(NORMED, **IN_LOSS)
def gate_without_gradient(call: Call) -> Any:
    """The gate of the output is cut off from the graph."""
    return call.faulty(gate=call.gate.detach())


@planted(NORMED, **IN_LOSS)
def gate_with_the_slope_of_a_sigmoid(call: Call) -> Any:
    """The derivative of the gate's SiLU lacks its second term."""
    right = call.faulty(gate=call.gate.detach())
    normed = call.self.out_norm(call.x.reshape(-1, call.x.shape[-1])).detach()
    gate = call.gate.reshape(normed.shape)
    linear = normed * gate * gate.detach().sigmoid()
    return right + (linear - linear.detach()).to(right.dtype)


@planted(GATES, **IN_LOSS)
def rate_of_writing_without_gradient(call: Call) -> Any:
    """The rate of writing is cut off from the graph."""
    decay, rate = call.faulty()
    return decay, rate.detach()


@planted(GATES, **IN_LOSS)
def rate_of_decay_without_gradient(call: Call) -> Any:
    """The logarithm of the rate of decay gets no gradient."""
    return call.faulty(A_log_local_cp=call.A_log_local_cp.detach())


@planted(f"{NET}.common:_GDNBase.reset_parameters(self)", mesh=Mesh(tp=2), **IN_LOSS)
def norm_not_summed_over_ranks(call: Call) -> Any:
    """The norm of the output, which ranks have for their own heads, is not marked for the sum over them."""
    call.self.out_norm.weight.sequence_parallel = False
    return call.faulty()


@planted(f"{NET}.gdn:_build_thd_cp_a2a_perm(cu_seqlens, cp_size, t_global)", mesh=Mesh(cp=2), **DELTA)
def rows_of_ranks_in_the_order_of_ranks(call: Call) -> Any:
    """Rows of context-parallel ranks are scanned in the order of ranks, and not in that of tokens."""
    order, _ = call.faulty()
    same = torch.arange(len(order))
    return same, same


BOUNDED: dict[str, Any] = {"model": "tiny:gemma2", "fixes": ("bridge-5712",)}
SINKS: dict[str, Any] = {"model": "gpt-oss-20b"}
"""A file of tests/published_configs, scaled down."""


@planted(ATTEND, **BOUNDED)
def scores_not_bent(call: Call) -> Any:
    """Scores of attention have no bound."""
    return call.faulty(softcap=None)


@planted(ATTEND, **BOUNDED)
def scores_bent_before_they_are_scaled(call: Call) -> Any:
    """The bound of the scores is that of products which are not scaled yet."""
    return call.faulty(softcap=call.softcap * call.scale)


@planted(ATTEND, **BOUNDED)
def scale_of_twice_the_width(call: Call) -> Any:
    """Scores are divided by the root of twice what `query_pre_attn_scalar` says."""
    return call.faulty(scale=call.scale / 2**0.5)


@planted(ATTEND, **BOUNDED)
def window_of_one_row_more(call: Call) -> Any:
    """A window has as many rows before a row as config.json gives it with that row."""
    return call.original() if call.rows_before is None else call.faulty(rows_before=call.rows_before + 1)


@planted(ATTEND, **BOUNDED)
def window_on_every_layer(call: Call) -> Any:
    """Layers that attend to everything have a window too."""
    return call.original() if call.rows_before is not None else call.faulty(rows_before=8)


@planted(BENT, **BOUNDED)
def logits_not_bent(call: Call) -> Any:
    """Logits have no bound."""
    return call.wrong(call.logits)


@planted(BENT, **BOUNDED)
def slope_of_bent_logits_is_1(call: Call) -> Any:
    """The gradient of logits passes their bound as if there was none."""
    return call.logits + (call.faulty() - call.logits).detach()


@planted(ATTEND, **SINKS)
def sinks_left_out(call: Call) -> Any:
    """Attention has no sinks."""
    return call.faulty(sinks=None)


@planted(ATTEND, **SINKS)
def sinks_of_the_next_head(call: Call) -> Any:
    """Each head has the sink of its neighbour."""
    return call.faulty(sinks=call.sinks.roll(1))


@planted(ATTEND, **SINKS)
def sinks_without_gradient(call: Call) -> Any:
    """Sinks are cut off from the graph."""
    return call.faulty(sinks=call.sinks.detach())


@planted(ATTEND, **SINKS)
def windows_of_sinks_left_out(call: Call) -> Any:
    """Layers with a window attend to everything."""
    return call.original() if call.rows_before is None else call.faulty(rows_before=None)
