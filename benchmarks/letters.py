"""How many answers are exactly right: a language model is taught to sort letters, and asked, through codecs.

    python benchmarks/letters.py MODEL DATA RESULTS [OPTION...]

MODEL is a folder of transformers, DATA what language_data.py wrote. Every codec and seed is a run of `thinpipe train`
and one of `thinpipe generate --compare`, which asks without compression too; OPTIONs are passed on to both.
RESULTS.json and RESULTS.md are written.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from threading import Lock

CODECS, SEEDS, JOBS = ("none", "8bit", "4bit", "2bit"), (0, 1, 2), 12
TRAIN = (
    "--task chat --tokens 48 --batch-size 128 --chunks 1 --epochs 4 --lr 1e-3 --amp --client-layers 3,3 --in-process"
)
ASK = "--max-new-tokens 20 --client-layers 3,3"


def run(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "thinpipe", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"thinpipe {' '.join(words)}: {done.stdout[-2000:]} {done.stderr[-2000:]}")


def result(model: Path, data: Path, codec: str, seed: int, passed_on: list[str]) -> dict[str, float | int | str]:
    with tempfile.TemporaryDirectory() as folder:
        trained, record = Path(folder) / "trained", Path(folder) / "record.json"
        compress = ["--compress", codec, *passed_on]
        run("train", "--model", str(model), "--data", str(data / "letters.jsonl"), "--seed", str(seed), *TRAIN.split(),
            "--export", str(trained), "--json", str(record), *compress)  # fmt: skip
        (row,) = json.loads(record.read_text())["rows"]
        compare = ["--compare"] if codec != "none" else []
        run("generate", "--model", str(trained), "--prompts", str(data / "asked.jsonl"), *ASK.split(), "--json",
            str(record), *compress, *compare)  # fmt: skip
        answers = json.loads(record.read_text())["rows"]
    right = [json.loads(line)["completion"].strip() for line in (data / "asked.jsonl").read_text().splitlines()]
    pairs = list(zip(answers, right, strict=True))
    return {
        "codec": codec,
        "seed": seed,
        "validation_loss": row["validation_loss"],
        "right": 100 * fmean(answer["text"].strip() == text for answer, text in pairs),
        "right_asked_with_none": 100
        * fmean((answer["plain_text"] or answer["text"]).strip() == text for answer, text in pairs),
    }


def main(model: Path, data: Path, results: Path, passed_on: list[str]) -> None:
    cases = [(codec, seed) for seed in SEEDS for codec in CODECS]
    lock, found = Lock(), list[dict[str, float | int | str]]()

    def carry_out(case: tuple[str, int]) -> None:
        row = result(model, data, *case, passed_on)
        with lock:  # what is there stays, whatever ends this
            found.append(row)
            found.sort(key=lambda each: (CODECS.index(str(each["codec"])), each["seed"]))
            results.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
            results.with_suffix(".md").write_text("\n".join(table(found)) + "\n")

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(carry_out, cases))
    print("\n".join(table(found)))


def table(found: Sequence[Mapping[str, float | int | str]]) -> list[str]:
    lines = ["| trained and asked through | right, % | asked without compression, % | validation loss, nats |"]
    lines.append("|---|--:|--:|--:|")
    for codec in CODECS:
        cells = []
        for name, form in (("right", ".1f"), ("right_asked_with_none", ".1f"), ("validation_loss", ".4f")):
            values = [float(each[name]) for each in found if each["codec"] == codec]
            cells.append(
                f"{fmean(values):{form}} ({', '.join(f'{value:{form}}' for value in values)})" if values else ""
            )
        lines.append(f"| `{codec}` | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
