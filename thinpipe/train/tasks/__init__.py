"""Training tasks: each is data, a model, a metric and training defaults."""
