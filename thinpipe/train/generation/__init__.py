"""Text generation with a model whose layers are spread over several workers."""
