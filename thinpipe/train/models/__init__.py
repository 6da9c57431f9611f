"""Models of transformers, cut into units by their own forward."""
