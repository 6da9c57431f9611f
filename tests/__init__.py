"""The tests: one thread each, as they run beside each other; without a GPU its kernels run in Triton's interpreter."""

import os
from pathlib import Path

# Threads of several processes that wait for each other on the same cores take them from those that compute.
os.environ["OMP_NUM_THREADS"] = "1"

# Set before anything imports Triton, as transformers does: its functions are made for one or the other.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
