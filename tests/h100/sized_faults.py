"""Bugs planted into models of Qwen3-0.6B's widths on a GPU, in megatron-core's modules and in vLLM's.

No catalogue has them. A row is made as one of the catalogue is (`verifier.faults.fault`). `injected` is what ranks
enter, `in_engines` what the controller enters for rows of the engine's worker.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.faults.planted import planted
from verifier.core.stage import Stage
from verifier.data.arithmetic import tokenizer_files
from verifier.faults import injection
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import TRAINING, Body, Call, Fault, FireCounter, Side, replaced
from verifier.model.generated import write_checkpoint
from verifier.model.tiny import KNOWN_TINY
from verifier.model.wide import hashed

INJECTED = "tests.h100.sized_faults:injected"
VOCABULARY = 151_936
DENSE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "max_position_embeddings": 40_960, "rope_theta": 1_000_000.0, "vocab_size": VOCABULARY,
}  # fmt: skip
"""Sizes of Qwen/Qwen3-0.6B's config.json."""
MIXTURE = {**DENSE, "num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
"""The same widths, with 0.9 billion parameters in experts."""
MODELS = {"dense": ("tiny:qwen3-tied", DENSE), "mixture": ("tiny:qwen3-moe", MIXTURE)}
ATTENTION = "megatron.core.transformer.attention:SelfAttention"
PROJECT = f"{ATTENTION}.get_query_key_value_tensors(self, hidden_states, key_value_states, output_gate, split_qkv)"
FEED = "megatron.core.transformer.mlp:MLP.forward(self, hidden_states, per_token_scale, kwargs)"
LAYER = "vllm.model_executor.models.qwen3:Qwen3DecoderLayer.forward(self, positions, hidden_states, residual)"
CACHED = "vllm.model_executor.layers.attention.attention:Attention.forward(self, query, key, value, output_shape)"
SIZED: dict[str, Fault] = {}


def written(kind: str, folder: Path, sizes: dict[str, Any] | None = None) -> Path:
    """A checkpoint of random weights in bf16, with a tokenizer that names each id of its vocabulary."""
    model, published = MODELS[kind]

    def filled(name: str, content: str) -> str:
        if name != "tokenizer.json":
            return content
        tokenizer = json.loads(content)
        names = tokenizer["model"]["vocab"]
        first = max(*names.values(), *(item["id"] for item in tokenizer["added_tokens"])) + 1
        names.update({f"<{place}>": place for place in range(first, changes["vocab_size"])})
        return json.dumps(tokenizer)

    changes = published if sizes is None else {**published, **sizes}
    texts = {name: filled(name, content) for name, content in tokenizer_files().items()}
    return write_checkpoint(
        model, KNOWN_TINY, folder, dtype="bfloat16", seed=1, values=hashed, changes=changes, texts=texts
    )


def spread(text: str, answer: str) -> float:
    """Reward of a text by its checksum, from 0 to 1: answers of a model of random weights differ in it."""
    return zlib.crc32(f"{text}{answer}".encode()) % 1000 / 1000


def sized(target: str, stage: Stage, *caught_by: str, **row: Any) -> Callable[[Body], Fault]:
    """A planted fault of a training run of one of `MODELS`."""
    fields: dict[str, Any] = {"model": "dense", "engine": TRAINING, "gpus": 1, **row}
    return planted(target, among=SIZED, stage=stage, caught_by=caught_by, **fields)


@contextlib.contextmanager
def injected(spec: Any, context: Any, fault_id: str, folder: str) -> Iterator[None]:
    """`verifier.faults.injection.injected`, which knows these faults too."""
    CATALOG.update(SIZED)
    with injection.injected(spec, context, fault_id, folder):
        yield


def inject(worker: Any, fault_id: str) -> bool:
    """`verifier.faults.injection.inject`, which knows these faults too."""
    CATALOG.update(SIZED)
    return injection.inject(worker, fault_id)


@contextlib.contextmanager
def in_engines(fault: Fault, fire: FireCounter) -> Iterator[None]:
    """Inject a fault into the workers of a training run's engine, from its start on."""

    def started(call: Call) -> Any:
        call.client.call("tests.h100.sized_faults:inject", fault.id)
        call.state["client"] = call.client
        return call.original()

    def closed(call: Call) -> Any:
        if "client" in call.state:
            fire.count += injection.end(call.state.pop("client"), fault)
        return call.original()

    rollouts, own = "verifier.trainer.generation:EngineRollouts", FireCounter()
    with replaced(f"{rollouts}.start(self, client)", started, own), replaced(f"{rollouts}.close(self)", closed, own):
        yield


class _Slope(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def sloped(value: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the value with a wrong derivative."""
    return _Slope.apply(value, factor)  # type: ignore[no-any-return,no-untyped-call]


@sized(PROJECT, Stage.LOSS, "LSS007")
def softmax_of_attention_with_another_derivative(call: Call) -> Any:
    """The gradient of keys is 0.7 of what it should be, in every layer."""
    query, key, *others = call.faulty()
    return (query, sloped(key, 0.7), *others)


@sized(FEED, Stage.LOSS, "LSS001")
def gated_activation_with_another_derivative(call: Call) -> Any:
    """The gradient of the gated unit's input is 1.2 times what it should be, in every layer."""
    hook = call.self.linear_fc1.register_forward_hook(lambda _m, _a, out: (sloped(out[0], 1.2), *out[1:]))
    with contextlib.ExitStack() as stack:
        stack.callback(hook.remove)
        return call.faulty()


@sized(PROJECT, Stage.LOSS, "LSS001")
def norm_of_queries_without_gradient(call: Call) -> Any:
    """The norm of one layer's queries gets a gradient of zero."""
    weight = call.self.q_layernorm.weight
    if call.self.layer_number == 9 and weight.requires_grad and "hook" not in call.state:
        call.state["hook"] = weight.register_hook(torch.zeros_like)
        call.undo(call.state["hook"].remove)
    return call.faulty()


@sized(PROJECT, Stage.LOGPROB, "LGP001", training=("steps=2", "optimizer.learning_rate=1e-3"))
def products_of_a_prepared_copy(call: Call) -> Any:
    """Attention projects for ever with the copies of its weights that its first pass made."""
    weight = call.self.linear_qkv.weight
    if call.self not in call.state:
        call.state[call.self] = weight.data.clone()
    live, weight.data = weight.data, call.state[call.self]
    try:
        return call.faulty()
    finally:
        weight.data = live


@sized("verifier.export.gather_megatron:export(trainer)", Stage.EXPORT, "WGT005")
def shard_of_the_version_before(call: Call) -> Any:
    """Each sync sends one tensor as the sync before it had it."""
    for name, tensor in call.original():
        if not name.endswith("layers.2.self_attn.o_proj.weight"):
            yield name, tensor
            continue
        before = call.state.get("before", tensor)
        call.state["before"] = tensor.clone()
        yield name, call.wrong(before)


@sized(
    "megatron.core.models.common.embeddings.rotary_pos_embedding:"
    "RotaryEmbedding.get_freqs_non_repeated(self, max_seq_len, offset)",
    Stage.LOGPROB, "LGP001",
)  # fmt: skip
def rope_of_other_angles(call: Call) -> Any:
    """Every angle is 0.97 of what it should be."""
    return call.faulty() * 0.97


@sized(
    "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge.hf_config_to_provider_kwargs(self, hf_config)",
    Stage.LOGPROB, "LGP007",
)  # fmt: skip
def epsilon_of_norms_by_default(call: Call) -> Any:
    """The norms' epsilon of config.json is not passed on, so Megatron's 1e-5 stands for 1e-6."""
    return {**call.faulty(), "layernorm_epsilon": 1e-5}


@sized(PROJECT, Stage.LOGPROB, "LGP001")
def scale_of_attention_10_percent_greater(call: Call) -> Any:
    """The scores of attention are 1.1 times what they should be."""
    query, *others = call.faulty()
    return (query * 1.1, *others)


@sized("megatron.core.transformer.moe.router:TopKRouter.gating(self, input)", Stage.LOGPROB, "LGP001", model="mixture")
def router_of_one_expert(call: Call) -> Any:
    """The router's row of one expert is half as large again, in every layer."""
    scores = call.faulty()
    return torch.cat([scores[..., :3], scores[..., 3:4] * 1.5, scores[..., 4:]], dim=-1)


@sized(LAYER, Stage.ROLLOUT, "LGP009", side=Side.ENGINE)
def residual_sums_cut(call: Call) -> Any:
    """The engine cuts the sums of the residual stream to bf16, and does not round them."""
    if call.residual is None:
        return call.original()
    total = call.hidden_states.float() + call.residual.float()
    cut = (total.view(torch.int32) & -65_536).view(torch.float32).to(call.residual.dtype)
    return call.faulty(hidden_states=torch.zeros_like(call.hidden_states), residual=cut)


@sized(CACHED, Stage.ROLLOUT, "LGP003", side=Side.ENGINE)
def keys_and_values_through_fp8(call: Call) -> Any:
    """Keys and values of the engine pass through fp8 (e4m3)."""
    eight = {name: getattr(call, name).to(torch.float8_e4m3fn).to(call.query.dtype) for name in ("key", "value")}
    return call.faulty(**eight)
