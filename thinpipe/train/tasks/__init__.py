"""Workloads: what is trained. A task is data, a model, a metric and a recipe."""
