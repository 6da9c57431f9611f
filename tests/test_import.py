"""Importing thinpipe is cheap: what is heavy is imported by what needs it, and no thread starts."""

import subprocess
import sys

CODE = """
import os, sys, threading
import torch
before, threads = set(sys.modules), len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
import thinpipe
added = set(sys.modules) - before
heavy = {"numba", "llvmlite", "sklearn", "scipy", "matplotlib", "transformers", "datasets", "typer", "rich", "pandas"}
heavy.add("cryptography")
assert not added & heavy, added & heavy
assert threading.active_count() == 1
if threads:
    assert len(os.listdir("/proc/self/task")) == threads
assert len(added) < 60, sorted(added)
print("light")
"""


def test_import_brings_nothing_heavy_and_starts_no_thread():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "light", done.stderr
