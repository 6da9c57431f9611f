"""Imported by the process that workers of tests are forked from: the loops of most codecs are compiled there, once."""

import torch

import thinpipe

for _spec in ("tile:8", "tile:2+sr", "sort:8", "uniform:8", "kmeans:2"):
    _codec, _values = thinpipe.codec(_spec), torch.linspace(-1, 1, 4096)
    _codec.decode(_codec.encode(_values), torch.empty_like(_values))
