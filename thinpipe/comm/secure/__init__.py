"""Encrypted and authenticated connections between machines that do not share a network."""
