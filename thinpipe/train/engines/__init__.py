"""Engines: one training step, used by training and benchmarks, for every form of parallelism."""
