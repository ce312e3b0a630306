"""From trainer shards back to checkpoint tensors: where each lives, and gathering them."""
