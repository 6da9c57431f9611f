"""Imported once by the server that forks workers, so that they start with torch and the pipeline in memory."""

import atexit
import importlib
import os
import signal

# By its name: workers as such know nothing of pipelines, but nearly all of them run one.
importlib.import_module("thinpipe.pipeline.stage")

# What ends the process group reaches the server too; it must outlive its workers, to say how they ended.
for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)

# It has nothing to clean up, and an ordinary exit with torch in memory takes a second.
atexit.register(os._exit, 0)
