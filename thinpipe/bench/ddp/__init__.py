"""The data-parallel benchmark: iteration time of DistributedDataParallel, and accuracy with compressed gradients."""
