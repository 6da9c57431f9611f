"""Benchmarks, ablations, records and network emulation."""
