"""The picture of one step of a run."""

from __future__ import annotations

from pathlib import Path

from thinpipe.pipeline.trace import draw, gather_step, write_chrome_trace
from thinpipe.training.beside import written_beside
from thinpipe.training.engine import Engine
from thinpipe.training.pipeline_engine import PipelineEngine

_STEP = 10  # of those this process makes, or the last if there are fewer: by then everything has warmed up


class StepTrace:
    """Traces one step and writes it to ``path``; does nothing if that is None."""

    def __init__(self, path: Path | None, first_step: int, last_step: int) -> None:
        self._path = path
        self._step = min(first_step + _STEP, last_step)

    def begin(self, engine: Engine, step: int) -> bool:
        """Whether this step, just about to start, is traced."""
        if self._path is None or step != self._step or not isinstance(engine, PipelineEngine):
            return False
        engine.trace(True)
        return True

    def end(self, engine: Engine) -> None:
        """A collective."""
        assert self._path is not None
        assert isinstance(engine, PipelineEngine)
        bars = gather_step(engine.training_stages)
        engine.trace(False)
        if engine.place.is_client:
            with written_beside("{trace}", self._path) as temporary:
                (draw if self._path.suffix == ".png" else write_chrome_trace)(bars, temporary)
