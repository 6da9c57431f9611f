"""Starting workers: local ones, or this process as one of several machines."""
