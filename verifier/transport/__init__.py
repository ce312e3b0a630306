"""Moving packed chunks from the trainer to the engine's ranks."""
