"""The machine: files, sizes in bytes, time and memory of a call."""
