"""Network emulation: namespaces whose links have a rate, a delay and loss."""
