"""`verifier train` on GPUs: bf16 with vLLM on the same GPU by CUDA IPC, turns with a sleeping engine, state on the host."""

from __future__ import annotations
