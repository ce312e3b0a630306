"""Where flashinfer and the CuTe DSL are installed, the processes that ranks and engines are forked from do without.

What this does not exercise: the packages themselves, and CUDA, which their imports start; both are of the GPU tier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verifier.engine.process import VLLM_ENVIRONMENT

LOOK = """
from verifier.engine import server
from verifier.platform import import_megatron

server.preload()
from vllm.utils.flashinfer import has_flashinfer

del sys.modules["flashinfer"]  # what left it out for vLLM is not to do so for Megatron
import_megatron("cpu")
from megatron.core.inference.quantization import mxfp8_tensor

print(has_flashinfer(), mxfp8_tensor.HAVE_FLASHINFER)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with packages of these names, whose import fails as no missing package's does, and their kernels."""
    for name in ("flashinfer", "cutlass"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('CUDA is started')\n")
    (tmp_path / "flashinfer_cubin").mkdir()  # with it, vLLM asks for no nvcc before it says that flashinfer is there
    (tmp_path / "flashinfer_cubin" / "__init__.py").write_text("")
    return tmp_path


@pytest.mark.slow
def test_libraries_find_no_flashinfer(installed: Path) -> None:
    code = f"import sys\nsys.path[:] = {json.dumps([str(installed), *sys.path])}\n{LOOK}"
    environment = {**os.environ, **VLLM_ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["False False"]), done.stderr[-3000:]
