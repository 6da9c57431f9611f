"""The laboratory: benchmarks, ablations, records and emulated networks."""
