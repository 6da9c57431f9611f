"""Plans: predict the step time of every way to train a model on a cluster, and choose the best."""
