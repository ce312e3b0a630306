"""Contents of the engine after loading."""
