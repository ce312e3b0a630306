"""Independent oracles: transformers in float32, Adam in float64."""
