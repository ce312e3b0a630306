"""Plan of a weight transfer, and the content digest."""
