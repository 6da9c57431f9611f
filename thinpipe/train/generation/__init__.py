"""Generation: texts from a model whose layers live on several workers."""
