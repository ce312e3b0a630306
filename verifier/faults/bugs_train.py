"""Bugs of the training step: masters, moments, replicas, norms, and steps at the wrong time or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired, Inject
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

STEP = "verifier.train.step_megatron"
MAKE_OPTIMIZER = "verifier.train.optimizer_megatron:make_optimizer"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
SCHEDULER = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler"
BIAS_UPDATE_RATE = 1e-3
"""megatron-core's default."""
FINALIZE = "megatron.core.distributed.finalize_model_grads"


@contextlib.contextmanager
def _stale_masters(fired: Fired) -> Iterator[None]:
    import torch

    def make(original: Any) -> Any:
        def make_optimizer(trainer: Any, **options: Any) -> Any:
            fired()
            parameters = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
            loaded = [parameter.detach().clone() for parameter in parameters]
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(0.875)
                optimizer = original(trainer, **options)
                for parameter, weight in zip(parameters, loaded, strict=True):
                    parameter.copy_(weight)
            return optimizer

        return make_optimizer

    with replaced(MAKE_OPTIMIZER, "trainer, learning_rate, clip_grad", make):
        yield


@contextlib.contextmanager
def _sequence_parallel_grads_not_reduced(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def reduce(model: Any, config: Any, tp_group: Any = None) -> None:
            fired()

        return reduce

    with replaced(f"{FINALIZE}:_allreduce_non_tensor_model_parallel_grads", "model, config, tp_group", make):
        yield


@contextlib.contextmanager
def _router_not_marked(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def connect(chunks: Any, data_parallel: Any) -> None:
            for chunk in chunks:
                for name, parameter in chunk.named_parameters():
                    if name.endswith("layers.1.mlp.router.weight"):
                        fired()
                        parameter.sequence_parallel = False
            original(chunks, data_parallel)

        return connect

    with replaced("verifier.model.provider_megatron:_connect", "chunks, data_parallel", make):
        yield


@contextlib.contextmanager
def _finalize_missing(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def connect(chunks: Any, data_parallel: Any) -> None:
            from megatron.core.utils import get_model_config

            def finish_only(model: Any, num_tokens: Any = None, **options: Any) -> None:
                fired()
                for chunk in model:
                    chunk.finish_grad_sync()

            original(chunks, data_parallel)
            get_model_config(chunks[0]).finalize_model_grads_func = finish_only

        return connect

    with replaced("verifier.model.provider_megatron:_connect", "chunks, data_parallel", make):
        yield


@contextlib.contextmanager
def _tied_grads_not_reduced(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def reduce(model: Any, config: Any, embd_group: Any = None, pp_group: Any = None) -> None:
            fired()

        return reduce

    with replaced(f"{FINALIZE}:_allreduce_word_embedding_grads", "model, config, embd_group, pp_group", make):
        yield


@contextlib.contextmanager
def _step_in_eval(fired: Fired) -> Iterator[None]:
    built: list[Any] = []

    def remember(original: Any) -> Any:
        def make_optimizer(trainer: Any, **options: Any) -> Any:
            built.append(original(trainer, **options))
            return built[-1]

        return make_optimizer

    def make(original: Any) -> Any:
        def score(trainer: Any, rollouts: Any, **options: Any) -> Any:
            scored = original(trainer, rollouts, **options)
            if built:
                fired()
                built[-1].step()
            return scored

        return score

    with (
        replaced(MAKE_OPTIMIZER, "trainer, learning_rate, clip_grad", remember),
        replaced(f"{STEP}:score", "trainer, rollouts, micro_batch_size, temperature, on_shards, on_chunk", make),
    ):
        yield


@contextlib.contextmanager
def _step_dropped(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def step(self: Any) -> bool:
            fired()
            return True

        return step

    with replaced(f"{OPTIMIZER}.step_with_ready_grads", "self", make):
        yield


def _resumed(lose: Callable[[dict[str, Any]], object]) -> Inject:
    """A fault of an optimizer that was saved and loaded after its first step: `lose` spoils a parameter's state."""

    def inject(fired: Fired) -> Any:
        resumed: list[Any] = []

        def make(original: Any) -> Any:
            def step(self: Any) -> bool:
                if self.optimizer.state and self not in resumed:
                    fired()
                    resumed.append(self)
                    for state in self.optimizer.state.values():
                        lose(state)
                done: bool = original(self)
                return done

            return step

        return replaced(f"{OPTIMIZER}.step_with_ready_grads", "self", make)

    return inject


def _scheduler_resumed(advances: int) -> Inject:
    """A fault of a scheduler that is loaded: it has advanced so many times as far as it should have."""

    def inject(fired: Fired) -> Any:
        def make(original: Any) -> Any:
            def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
                fired()
                original(self, {**state_dict, "num_steps": advances * state_dict["num_steps"]})

            return load_state_dict

        return replaced(f"{SCHEDULER}.load_state_dict", "self, state_dict", make)

    return inject


@contextlib.contextmanager
def _experts_counted_as_dense(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def is_counted(param: Any, tp_group: Any = None, expert_tp_group: Any = None) -> bool:
            counted: bool = original(param, tp_group, expert_tp_group)
            if counted and not getattr(param, "allreduce", True) and tp_group.rank() > 0:
                fired()
                counted = False
            return counted

        return is_counted

    target = "megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate"
    with replaced(target, "param, tp_group, expert_tp_group", make):
        yield


@contextlib.contextmanager
def _masters_rebuilt(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def step(self: Any) -> bool:
            if self.optimizer.state:
                fired()
                self.reload_model_params()
            done: bool = original(self)
            return done

        return step

    with replaced(f"{OPTIMIZER}.step_with_ready_grads", "self", make):
        yield


@contextlib.contextmanager
def _score_bias_balanced(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def configure(provider: Any, mesh: Any, dtype: Any, tier: Any) -> None:
            fired()
            original(provider, mesh, dtype, tier)
            provider.moe_router_bias_update_rate = BIAS_UPDATE_RATE

        return configure

    with replaced("verifier.model.provider_megatron:_configure", "provider, mesh, dtype, tier", make):
        yield


@contextlib.contextmanager
def _everything_decays(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def get_optimizer(config: Any, chunks: Any, **options: Any) -> Any:
            fired()
            return original(config, chunks, **{**options, "config_overrides": {}})

        return get_optimizer

    with replaced(
        "megatron.core.optimizer:get_megatron_optimizer",
        "config, model_chunks, config_overrides, use_gloo_process_groups, pg_collection, dump_param_to_param_group_map",
        make,
    ):
        yield


FAULTS = (
    Fault(
        id="norms-decay",
        stage=Stage.TRAIN,
        reproduces="ServiceNow/Fast-LLM#542",
        summary="rules of one's own replace the standard ones, and weight decay takes hold of norms and biases too",
        caught_by=("TRN001",),
        inject=_everything_decays,
    ),
    Fault(
        id="masters-rebuilt-from-model",
        stage=Stage.TRAIN,
        reproduces="NVIDIA/Megatron-LM#2789",
        summary="fp32 masters are made anew of the bf16 model before the second step, and lose their low bits",
        caught_by=("TRN001",),
        inject=_masters_rebuilt,
        model="tiny:qwen3",
        dtype="bfloat16",
    ),
    Fault(
        id="score-bias-balanced",
        stage=Stage.TRAIN,
        reproduces="NovaSky-AI/SkyRL#1908",
        summary="every step moves the routers' score bias towards balanced experts, with a policy loss too",
        caught_by=("WGT007",),
        inject=_score_bias_balanced,
        model="tiny:deepseek-v3",
    ),
    Fault(
        id="masters-stale-after-load",
        stage=Stage.TRAIN,
        reproduces="NovaSky-AI/SkyRL#2149",
        summary="weights are loaded after the optimizer took its fp32 masters, which are not refreshed",
        caught_by=("WGT007",),
        inject=_stale_masters,
        model="tiny:deepseek-v3",
        dtype="bfloat16",
    ),
    Fault(
        id="sequence-parallel-grads-not-reduced",
        stage=Stage.LOSS,
        reproduces="NVIDIA/Megatron-LM#1446",
        summary="gradients of norms that sequence parallelism replicates are not summed over tp",
        caught_by=("LSS001", "WGT002"),
        inject=_sequence_parallel_grads_not_reduced,
        mesh=Mesh(tp=2, ep=2),
    ),
    Fault(
        id="router-without-sequence-parallel-mark",
        stage=Stage.LOSS,
        reproduces="NVIDIA/Megatron-LM#619",
        summary="one layer's router lacks its sequence-parallel mark, so its copies on tp ranks part",
        caught_by=("LSS001", "WGT002"),
        inject=_router_not_marked,
        mesh=Mesh(tp=2, ep=2),
    ),
    Fault(
        id="finalize-hook-missing",
        stage=Stage.LOSS,
        reproduces="NVIDIA-NeMo/RL#3716",
        summary="the schedule is not given finalize_model_grads: no sum over tp, no division by the number of tokens",
        caught_by=("LSS001", "WGT002"),
        inject=_finalize_missing,
        mesh=Mesh(tp=2, ep=2),
    ),
    Fault(
        id="tied-grads-not-reduced",
        stage=Stage.LOSS,
        reproduces="NVIDIA-NeMo/RL#666",
        summary="the two copies of a tied embedding are trained apart, each on its own stage's gradient",
        caught_by=("LSS001", "WGT002"),
        inject=_tied_grads_not_reduced,
        model="tiny:qwen3-tied",
        mesh=Mesh(pp=2),
    ),
    Fault(
        id="step-in-evaluation",
        stage=Stage.TRAIN,
        reproduces="NVIDIA-NeMo/RL#1012",
        summary="the optimizer steps after an evaluation too, with the gradients that the last step left",
        caught_by=("WGT009",),
        inject=_step_in_eval,
    ),
    Fault(
        id="step-dropped",
        stage=Stage.TRAIN,
        reproduces="verl-project/verl#2377",
        summary="steps are dropped, as for a gradient that is not finite, and reported as done",
        caught_by=("WGT008", "TRN001"),
        inject=_step_dropped,
    ),
    Fault(
        id="adam-step-stale",
        stage=Stage.TRAIN,
        reproduces="NovaSky-AI/SkyRL#1403",
        summary="saving and loading the optimizer loses Adam's count of steps: its moments' bias is corrected anew",
        caught_by=("TRN001",),
        inject=_resumed(lambda state: state["step"].zero_()),
    ),
    Fault(
        id="moments-not-restored",
        stage=Stage.TRAIN,
        reproduces="NVIDIA-NeMo/RL#3171",
        summary="a run goes on from its weights alone, and Adam's moments begin again at zero",
        caught_by=("TRN001",),
        inject=_resumed(lambda state: [value.zero_() for value in state.values()]),
    ),
    Fault(
        id="scheduler-not-resumed",
        stage=Stage.TRAIN,
        reproduces="THUDM/slime#1152",
        summary="a run that goes on does not advance its scheduler: rates begin again at those of the first step",
        caught_by=("TRN001",),
        inject=_scheduler_resumed(0),
    ),
    Fault(
        id="scheduler-resumed-twice",
        stage=Stage.TRAIN,
        reproduces="THUDM/slime#1775",
        summary="a run that goes on advances its scheduler by hand, and once more by what was saved of it",
        caught_by=("TRN001",),
        inject=_scheduler_resumed(2),
    ),
    Fault(
        id="experts-outside-gradient-norm",
        stage=Stage.TRAIN,
        reproduces="NVIDIA/Megatron-LM#5916",
        summary="experts of all tp ranks but the first are left out of the norm by which gradients are clipped",
        caught_by=("TRN001",),
        inject=_experts_counted_as_dense,
        mesh=Mesh(tp=2, ep=2),
    ),
)
