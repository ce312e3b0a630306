"""Pure abstractions: stage, evidence, trace, comparison, finding, check, gate; no I/O but in `store`."""
