"""Many training runs from one plan: which they are, carrying them out, what came of them."""
