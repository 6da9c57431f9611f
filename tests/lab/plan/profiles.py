"""Profiles and clusters for tests, without a model."""

from typing import Any

from thinpipe.lab.plan.cluster import Cluster, parse_cluster
from thinpipe.lab.plan.profile import ModelProfile, TensorProfile, UnitProfile


def profile(units: int = 10, *, gflops: float = 10.0, parameters: int = 10_000_000, **facts: Any) -> ModelProfile:
    """Return equal units that send 256 x 512 floats a sample."""
    sent = TensorProfile(shape=(256, 512), dtype="float32", has_gradient=True)
    made = [
        UnitProfile(
            name=f"layer-{number}",
            flops=gflops * 1e9,
            parameters=parameters,
            trained=parameters,
            kept_bytes=4e6,
            outputs=(sent,),
        )
        for number in range(units)
    ]
    return ModelProfile(name="equal", units=tuple(made), per_sample=256, unit_of_speed="tokens", **facts)


def cluster(count: int, link: str | None = "1gbit,1ms", **facts: Any) -> Cluster:
    """Return equal machines."""
    machine = {"tflops": 1.0, "memory": "8GiB", "count": count, **facts}
    return parse_cluster("test", {"machines": {"node": machine}, "links": {} if link is None else {"default": link}})
