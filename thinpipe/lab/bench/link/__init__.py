"""The link benchmark: transfer times of messages of each size between two workers, with and without codecs."""
