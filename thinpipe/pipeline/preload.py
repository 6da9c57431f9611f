"""Imported once by the server that forks workers, so that they start with torch and the pipeline in memory."""

import signal

import thinpipe.pipeline.stage  # noqa: F401

# What ends the process group reaches the server too; it must outlive its workers, to say how they ended.
for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)
