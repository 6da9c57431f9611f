"""The codec benchmark: size, error and time of each codec on each tensor."""
