"""Pure abstractions: stage, evidence, trace, comparison, finding, check; no I/O but in `store`."""
