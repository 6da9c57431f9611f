"""Access to the machine: files, sizes in bytes, time and memory of a call, sanitized text."""
