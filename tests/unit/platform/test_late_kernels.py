"""Kernels whose import starts CUDA are imported when a rank first calls one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from verifier.platform import leave_out
leave_out("kernels_of_a_test")
from megatron.core.ssm.gated_delta_net import common, gdn
from verifier.platform.cuda import offer_delta_kernels
offer_delta_kernels("kernels_of_a_test")
assert common.HAVE_FLA and sys.modules["kernels_of_a_test"] is None
assert gdn.chunk_gated_delta_rule(2, scale=3) == ("chunk_gated_delta_rule", 2, 3)
assert common.l2norm(5) == ("l2norm", 5, None) and gdn.causal_conv1d(7) == ("causal_conv1d", 7, None)
"""
NAMES = {
    "modules/convolution": "causal_conv1d",
    "modules/l2norm": "l2norm",
    "ops/gated_delta_rule": "chunk_gated_delta_rule",
}


def test_functions_of_gated_delta_nets_are_imported_at_their_first_call(tmp_path: Path) -> None:
    for place, name in NAMES.items():
        file = tmp_path / "kernels_of_a_test" / f"{place}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def {name}(x, scale=None):\n    return '{name}', x, scale\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
