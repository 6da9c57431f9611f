"""The codec benchmark: what each codec sends, loses and costs, on each tensor."""
