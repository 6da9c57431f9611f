"""Records of measurements, and their tables, plots and comparisons; independent of pipelines and codecs."""
