"""Stands in for ``thinpipe train``: a record within milliseconds, or the trouble that its codec asks for.

    uniform:1 fails; uniform:2 ends well without finite metrics; uniform:3 trains until it is interrupted.

Every start is noted in the file that FAKE_TRAIN_LOG names, and so are its threads and every Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def note(word: str) -> None:
    with Path(os.environ["FAKE_TRAIN_LOG"]).open("a") as log:
        log.write(f"{word}\n")


def main() -> int:
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    codec = given.get("--compress") or f"{given['--compress-forward']}/{given['--compress-backward']}"
    seed = int(given.get("--seed", "0"))
    note(f"{codec} seed {seed} threads {os.environ['OMP_NUM_THREADS']}")
    if codec == "uniform:1":
        print("thinpipe: the loss is not finite at step 7")
        return 1
    if codec == "uniform:3":

        def interrupted(*_: object) -> None:
            note("interrupted")
            sys.exit(130)

        signal.signal(signal.SIGINT, interrupted)
        print("step 1 of 9\n", flush=True)
        note("waiting")
        time.sleep(60)
    bits = {"none": 32, "fp16": 16}.get(codec) or int(codec.rpartition(":")[2].partition("+")[0])
    row = {
        "metric": None if codec == "uniform:2" else 0.9 + 0.01 * seed,
        "validation_loss": 0.5,
        "train_loss": 0.5,
        "samples_per_s": 100.0,
        "seconds": 0.1,
        "wire_ratio": bits / 32,
        "wire_bytes_per_step": 1e5 * bits,
        "encode_ms_per_step": 2.0 + seed,
        "decode_ms_per_step": 1.0 + seed,
        "epochs": [{"epoch": 1}],
    }
    record = {
        "format": 1,
        "kind": "train",
        "thinpipe": "0.1.0",
        "environment": {"torch": "2.13.0", "cpu": "a processor", "cores": 4, "threads": 1, "devices": []},
        "config": {},
        "columns": [{"name": "metric", "heading": "accuracy", "format": ".1%", "better": "higher"}],
        "rows": [row],
        "checks": [],
    }
    Path(given["--json"]).write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
