"""Benchmarks of codecs, links, data-parallel training and pipelines."""
