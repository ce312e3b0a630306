"""Start ranks: import the heavy libraries once, fork a process per rank, and let no rank wait without a deadline."""
