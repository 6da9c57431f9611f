"""thinpipe train: from its options to a run, and what those who watch the run are told."""
