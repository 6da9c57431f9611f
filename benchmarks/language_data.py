"""Write the data that small language models are fine-tuned on: source code, and letters to sort.

    python benchmarks/language_data.py DIR

DIR/code has the modules of Python's standard library, without its tests; DIR/letters.jsonl has examples for task chat,
each of five letters and the same letters sorted; DIR/held_out.jsonl has 500 others to evaluate the model with.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import sysconfig
from pathlib import Path

LETTERS, EXAMPLES, HELD_OUT = 5, 16_000, 500


def write_code(folder: Path) -> int:
    """Copy modules at the top of the library and of its smaller packages, 4 MB of them; return their bytes."""
    shutil.rmtree(folder, ignore_errors=True)  # another Python may have written there
    library, size = Path(sysconfig.get_paths()["stdlib"]), 0
    for path in sorted([*library.glob("*.py"), *library.glob("[a-hj-z]*/*.py")]):
        if size < 4_000_000 and path.parent.name not in ("site-packages", "dist-packages", "test"):
            place = folder / path.relative_to(library).with_suffix(".txt")  # task lm takes no other endings
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
            size += place.stat().st_size
    return size


def write_letters(folder: Path) -> None:
    draw = random.Random(0)
    seen: set[str] = set()
    while len(seen) < EXAMPLES + HELD_OUT:
        seen.add("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=LETTERS)))
    lines = [
        json.dumps({"prompt": f"sort {' '.join(each)} =", "completion": f" {' '.join(sorted(each))}"})
        for each in sorted(seen, key=lambda each: draw.random())
    ]
    for name, part in (("letters", lines[HELD_OUT:]), ("held_out", lines[:HELD_OUT])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    print(f"{write_code(target / 'code') / 1e6:.1f} MB of source code")
    write_letters(target)
