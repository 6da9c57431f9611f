"""A record of iteration times with figures made up beforehand."""

from thinpipe.lab.bench.ddp.ddp_columns import COLUMNS, KIND, ReplicaGroup, ReplicaTimes, make_row
from thinpipe.lab.records.record import Record

GROUPS = [
    ReplicaGroup(name="no ddp", size=1, ddp=False),
    ReplicaGroup(name="1M/1G", size=1, ddp=True),
    ReplicaGroup(name="1M/8G", size=8, ddp=True),
    ReplicaGroup(name="2M/8G", size=16, ddp=True),
]
TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tNV2\nGPU1\tNV2\t X "


def make_record(factor=1.0, bucket_cap_mb=25.0, compress=None):
    rows = []
    for model, seconds in (("resnet50", 0.1), ("mobilenetv2", 0.004)):
        for i, group in enumerate(GROUPS):
            samples_s = tuple((seconds + 0.001 * i + 0.0001 * k) * (factor if group.ddp else 1) for k in range(11))
            wire_bytes = 26_000_000 if compress and group.ddp else None
            sample = ReplicaTimes(samples_s=samples_s, gradient_bytes=102_228_128, wire_bytes=wire_bytes)
            rows.append(make_row(model, group, 32, "cuda", [sample] * group.size))
    return Record(
        kind=KIND,
        config={
            "backend": "nccl",
            "batch_size": 32,
            "link_mbit_per_s": None,
            "bucket_cap_mb": bucket_cap_mb,
            "compress": compress,
            "hook": None,
        },
        columns=COLUMNS,
        rows=tuple(rows),
        environment={
            "torch": "2.11.0",
            "cuda": "12.8",
            "devices": ["NVIDIA H200"] * 2,
            "cpu": "a CPU",
            "threads": 8,
            "topology": TOPOLOGY,
        },
        thinpipe="0.1.0",
    )
