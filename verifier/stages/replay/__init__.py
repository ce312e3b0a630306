"""Recorded expert routes to per-layer router indices."""
