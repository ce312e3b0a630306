"""Contracts: what checks and rooms take from upstream packages, looked at in the packages that are installed."""
