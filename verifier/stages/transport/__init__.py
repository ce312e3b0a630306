"""Bytes from trainer to engine."""
