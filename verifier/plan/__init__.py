"""Contents and order of a weight transfer, and the digests that confirm it."""
