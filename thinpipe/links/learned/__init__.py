"""Link encodings that learn a PCA basis from the tensors they send."""
