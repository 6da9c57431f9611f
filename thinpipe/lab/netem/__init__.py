"""Network emulation: network namespaces joined by links with a rate, a delay and loss."""
