"""The data-parallel benchmark: iteration time of DistributedDataParallel."""
