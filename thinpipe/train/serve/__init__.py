"""Servers without files of their own: what they need to hold their layers comes from the client."""
