"""Order, names, dtypes, bytes of what will travel."""
