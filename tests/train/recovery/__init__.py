"""The simulator of recovery and its tests."""
