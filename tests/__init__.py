"""The tests. Without a GPU the kernels for one run in Triton's interpreter."""

import os
from pathlib import Path

# Set before anything imports Triton, as transformers does: its functions are made for one or the other.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
