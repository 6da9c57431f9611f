"""Communication between processes: backends, rendezvous, control channel, small messages, signals and errors."""
