"""Records and tables of runs of the trainer: training, evaluation and generation."""
