"""Formulas of the GRPO family: pure functions of numbers, without ranks, layouts or engines.

What depends on the whole batch (advantages, importance weights, denominators) is computed once, by id, before the batch
is split. Ranks get one weight per token and sum weight times loss, so no split, order, padding or mesh changes a step.
"""
