"""Training: one loop for pipelines, data-parallel replicas and a single process."""
