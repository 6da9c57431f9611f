"""Benchmarks: what is measured, held against what, and how it is shown."""
