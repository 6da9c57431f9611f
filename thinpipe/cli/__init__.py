"""The command line: one file per command, from options to a call, its record and its output."""
