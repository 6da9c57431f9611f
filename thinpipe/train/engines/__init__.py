"""Engines: one training step, for training and for benchmarks, whatever is parallel."""
