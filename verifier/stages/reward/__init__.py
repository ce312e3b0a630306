"""Answers to rewards."""
