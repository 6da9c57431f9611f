"""Ablations: the runs of a plan, their execution, and the statistics of their results."""
