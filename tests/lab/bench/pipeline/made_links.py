"""Links of a pipeline that nobody measured."""

from thinpipe.pipeline.report import LinkReport


def link(source_worker, target_worker, wire_bytes, stages=(0, 1)):
    times = dict.fromkeys(("encode_ms", "decode_ms", "blocked_ms", "wait_ms", "transfer_ms"), 0.0)
    return LinkReport(
        source=stages[0], target=stages[1], source_worker=source_worker, target_worker=target_worker,
        direction="forward", messages=1, tensor_bytes=wire_bytes, wire_bytes=wire_bytes, link_mb_per_s=None, **times,
    )  # fmt: skip
