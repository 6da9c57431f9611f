"""The pipeline benchmark: pipelines against data-parallel and single-process training, over links of any rate."""
