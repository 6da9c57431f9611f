"""Those who watch a training run: the terminal, curves on disk, a record; and what is checked before it starts."""
