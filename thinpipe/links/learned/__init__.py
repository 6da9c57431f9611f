"""Links that learn a PCA basis from what they carry."""
