"""Checkpoints: what a run is saved as, and how it goes on from there."""
