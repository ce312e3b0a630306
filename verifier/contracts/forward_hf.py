"""Contracts of transformers' forward passes on a CPU: the state-space recurrence, row by row, and end tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn import functional

from verifier.model.tiny import write_tiny
from verifier.model.transformers_hf import load_model
from verifier.platform.upstream_fixes import TRANSFORMERS_SCAN

CHUNK = 16
ROWS = 40


@contextmanager
def _checkpoint() -> Iterator[Path]:
    sizes = {"hybrid_override_pattern": "M", "num_hidden_layers": 1, "chunk_size": CHUNK, "vocab_size": 64}
    with tempfile.TemporaryDirectory(prefix="verifier-contract-") as folder:
        yield write_tiny("nemotron-h", Path(folder), changes=sizes)


def transformers_loses_the_state_between_chunks() -> None:
    """Why `upstream_fixes_transformers.py` is there; when this fails, transformers is right by itself."""
    from transformers import AutoModelForCausalLM

    with _checkpoint() as path:
        mixer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().model.layers[0].mixer
    gap = _gap(mixer)
    assert gap[:CHUNK].max() < 1e-5
    assert gap[CHUNK:].max() > 1e-3


def an_engine_has_the_fix_of_the_state() -> None:
    """Transformers as an engine computes the recurrence, with the fix."""
    with _checkpoint() as path:
        fixed = load_model(path, torch.float32, fixes=(TRANSFORMERS_SCAN,))
    assert _gap(fixed.model.layers[0].mixer).max() < 1e-5


def the_oracle_keeps_the_state() -> None:
    """The oracle computes the recurrence."""
    with _checkpoint() as path:
        assert _gap(load_model(path, torch.float32).model.layers[0].mixer).max() < 1e-5


def the_oracle_raises_no_time_step() -> None:
    """Time steps below the config's bound stay as they are."""
    with _checkpoint() as path:
        mixer = load_model(path, torch.float32).model.layers[0].mixer
    mixer.dt_bias.data.fill_(-12.0)
    assert _gap(mixer).max() < 1e-5


@torch.inference_mode()
def _gap(mixer: torch.nn.Module) -> torch.Tensor:
    """[rows] greatest difference between the mixer and the recurrence that defines it."""
    x = torch.randn(1, ROWS, 96, generator=torch.Generator().manual_seed(0))
    return (mixer(x) - _recurrence(mixer, x)).abs().amax(-1)[0]


def _recurrence(mixer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    z, xbc, dt = mixer.in_proj(x)[0].double().split([128, 256, 16], dim=-1)
    weight, bias = mixer.conv1d.weight.double(), mixer.conv1d.bias.double()
    xbc = functional.silu(functional.conv1d(functional.pad(xbc.T, (3, 0))[None], weight, bias, groups=256))[0].T
    x_LHP, B_LGN, C_LGN = (part.reshape(ROWS, -1, 8) for part in xbc.split([128, 64, 64], dim=-1))
    dt_LH = functional.softplus(dt + mixer.dt_bias)
    state_HPN, rows = torch.zeros(16, 8, 8, dtype=torch.float64), []
    for now in range(ROWS):
        B_HN, C_HN = B_LGN[now].repeat_interleave(2, 0), C_LGN[now].repeat_interleave(2, 0)
        decay_H = (-mixer.A_log.double().exp() * dt_LH[now]).exp()
        state_HPN = decay_H[:, None, None] * state_HPN + (dt_LH[now, :, None] * x_LHP[now])[..., None] * B_HN[:, None]
        rows.append((state_HPN * C_HN[:, None]).sum(-1) + mixer.D[:, None] * x_LHP[now])
    gated = torch.stack(rows).reshape(ROWS, 128) * functional.silu(z)
    normed = functional.rms_norm(gated.unflatten(-1, (8, 16)), (16,), eps=1e-5).flatten(-2) * mixer.norm.weight
    return mixer.out_proj(normed.float())[None]
