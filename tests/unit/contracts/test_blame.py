"""The place of a failure is upstream's innermost frame, else ours, and the first error's message."""

import pytest

from verifier.contracts.blame import Blame, blame

SITE = "/any/.venv/lib/python3.12/site-packages"
UPSTREAM = f"""rank 0 failed: TypeError: bad
  Traceback (most recent call last):
    File "/any/verifier/runs/golden.py", line 12, in load
      build(model)
    File "{SITE}/megatron/core/x.py", line 34, in build
      torch.empty(size)
    File "{SITE}/torch/functional.py", line 56, in empty
      raise TypeError("bad")
  TypeError: bad
  During handling of the above exception, another exception occurred:
  RuntimeError: later
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (UPSTREAM, ("megatron", "megatron/core/x.py", 34, "TypeError: bad")),
        (
            f'File "{SITE}/torch/functional.py", line 56, in empty\n  x\nRuntimeError: no room\n',
            ("torch", "torch/functional.py", 56, "RuntimeError: no room"),
        ),
        (
            'File "/any/verifier/contracts/a.py", line 3, in f\n    assert x == 1\n           ^\nAssertionError\n',
            ("verifier", "verifier/contracts/a.py", 3, "AssertionError: assert x == 1"),
        ),
        ("a line\nverifier: refused\n", ("", "", 0, "verifier: refused")),
        ("", ("", "", 0, "nothing was said")),
    ],
    ids=["upstream", "torch-alone", "ours", "no-traceback", "silence"],
)
def test_blame(text, expected):
    assert blame(text) == Blame(**dict(zip(("package", "file", "line", "message"), expected, strict=True)))
