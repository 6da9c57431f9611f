"""The pipeline benchmark: pipelines compared with data-parallel and single-process training, over links of any rate."""
