"""Shapes and dtypes as JSON: what is described is made again, and names that are no dtypes are rejected."""

import json

import pytest
import torch

from thinpipe.system.tensors import dtype_named, empty_tensor, spec_bytes, spec_of, specs_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 5)])
def test_a_tensor_is_made_from_its_description(dtype, shape):
    tensor = torch.zeros(shape, dtype=dtype)
    spec = json.loads(json.dumps(specs_of({"a": tensor})))["a"]
    assert spec == spec_of(empty_tensor(spec))
    assert (empty_tensor(spec).shape, empty_tensor(spec).dtype) == (tensor.shape, dtype)
    assert spec_bytes(spec) == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("name", ["load", "no_such_dtype", "__doc__", ""])
def test_other_names_are_rejected(name):
    with pytest.raises(ValueError, match="a tensor has a dtype of torch, as in float32; got"):
        dtype_named(name)
