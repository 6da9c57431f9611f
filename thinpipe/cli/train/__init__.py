"""thinpipe train: from options to a run, and the output of the run."""
