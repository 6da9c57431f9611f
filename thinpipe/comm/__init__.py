"""Communication between processes: what each backend of ``torch.distributed`` can do."""
