"""One page: a result as HTML that holds all it needs, and what changed between two results."""
