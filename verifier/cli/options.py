"""Options that several commands share, each spelled and explained once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

MESH, RUN, RESULT = "Mesh", "Run", "Results"


class Dtype(StrEnum):
    """Weight types, as spelled on the command line."""

    FP32 = "fp32"
    BF16 = "bf16"


class EngineName(StrEnum):
    """Inference engines."""

    VLLM = "vllm"
    HF = "hf"


class Update(StrEnum):
    """How the weights change between two syncs."""

    STEP = "step"
    NOISE = "noise"


class Quantization(StrEnum):
    """What the engine makes of the weights that it is sent."""

    FP8 = "fp8"


class Transport(StrEnum):
    """How weights reach the engine."""

    GLOO = "gloo"
    NCCL = "nccl"
    IPC = "ipc"


Model = Annotated[
    str,
    typer.Option("--model", metavar="MODEL", help="Generated, tiny:NAME or wide:NAME, or a local HF directory."),
]
Tp = Annotated[int, typer.Option("--tp", help="Tensor parallel size; sequence parallel is on above 1.")]
Pp = Annotated[int, typer.Option("--pp", help="Pipeline parallel size.")]
Vpp = Annotated[int, typer.Option("--vpp", help="Virtual stages per pipeline stage.")]
Ep = Annotated[int, typer.Option("--ep", help="Expert parallel size.")]
Etp = Annotated[int, typer.Option("--etp", help="Expert tensor parallel size.")]
Cp = Annotated[int, typer.Option("--cp", help="Context parallel size.")]
Dp = Annotated[
    int | None,
    typer.Option("--dp", help="Data parallel size; by default the smallest for which ep*etp divides tp*cp*dp."),
]
FirstStageLayers = Annotated[
    int | None, typer.Option("--first-stage-layers", help="Layers on the first pipeline stage, where uneven.")
]
LastStageLayers = Annotated[
    int | None, typer.Option("--last-stage-layers", help="Layers on the last pipeline stage, where uneven.")
]
CudaGraphs = Annotated[
    bool, typer.Option("--cuda-graphs/--enforce-eager", help="vLLM replays captured CUDA graphs, or runs eagerly.")
]
SleepLevel = Annotated[
    int | None,
    typer.Option("--sleep-level", help="vLLM sleeps while the trainer steps: 1 keeps its weights, 2 drops them."),
]
EngineQuantization = Annotated[
    Quantization | None, typer.Option("--engine-quantization", help="vLLM quantises the weights as it loads them.")
]
EngineLoraRank = Annotated[
    int | None,
    typer.Option("--engine-lora-rank", help="Train an adapter of this rank on a frozen base, and sync the adapter."),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Type of the weights.")]
Fixes = Annotated[
    list[str] | None,
    typer.Option("--fix", metavar="ID", help="Install the fix of an upstream bug, or `all`; repeatable."),
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Deadline of the whole run.")]
TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", metavar="DIR", help="Where to save the trace; by default the next free traces/NAME-NNNN."),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the complete report as JSON.")
]
JunitOption = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Also write the report as JUnit XML, one case per check.")
]
