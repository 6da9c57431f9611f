"""Room for the copies of samples that ``delta(...)`` keeps: counted before the first step, for each machine."""

from __future__ import annotations

from thinpipe.measure.sizes import size_text
from thinpipe.options import OptionError
from thinpipe.pipeline.report import machine_id
from thinpipe.training.pipeline_engine import PipelineEngine
from thinpipe.training.settings import Running


def reserve_copies(engine: PipelineEngine, running: Running) -> None:
    """ValueError if the workers of this machine would keep more than they may. A collective."""
    told = engine.place.gather([machine_id() or f"worker {engine.place.worker}", engine.copies_bytes()])
    here = sum(size for where, size in told if where == told[engine.place.worker][0])
    if here > running.delta_cache_limit:
        raise OptionError(
            f"delta(...) keeps copies of all samples at both ends of every link: {size_text(here)} on this machine, "
            f"and {{delta_cache_limit}} allows {size_text(running.delta_cache_limit)}. Allow more, on disk instead of "
            "in memory with {delta_cache} DIR; cut the model where less travels ({client_layers}); or take another "
            "codec"
        )
    engine.reserve_copies()
