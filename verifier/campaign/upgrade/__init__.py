"""Other upstream versions, tried beside those that run here: contracts and a short gate on both, and what changed."""
