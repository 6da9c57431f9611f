"""thinpipe: pipeline-parallel training of a model across several machines over slow links.

Codecs         codec, Codec
Stages         PipelineStage, LinearSchedule, ClientServerSchedule, Schedule1F1B
Cutting        cut, measure_units, choose_cuts, cut_units, stages_of
Workers        run_workers, WorkerError, LinkError
Measuring      report, reset_counters, LinkReport, gather_step, draw, write_chrome_trace
DDP            ddp_hook, ddp_state, DDPState
Tasks          Task, Batch, Data, Part, TaskDefaults, Shape, Source, at_most, split_fifth, reject_unused_options

Guides with examples: docs/pipeline.md, docs/codecs.md, docs/ddp.md. On the command line: `thinpipe --help`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from thinpipe.extras import missing_extra
from thinpipe.version import __version__

if TYPE_CHECKING:
    from thinpipe.codecs import Codec, codec
    from thinpipe.comm.errors import LinkError, WorkerError
    from thinpipe.ddp import DDPState, ddp_hook, ddp_state
    from thinpipe.launch.workers import run_workers
    from thinpipe.pipeline.partition import choose_cuts, cut_units, measure_units, stages_of
    from thinpipe.pipeline.report import LinkReport, report, reset_counters
    from thinpipe.pipeline.schedule import ClientServerSchedule, LinearSchedule, Schedule1F1B
    from thinpipe.pipeline.stage import PipelineStage
    from thinpipe.pipeline.trace import draw, gather_step, write_chrome_trace
    from thinpipe.train.engines.units import cut
    from thinpipe.train.tasks.sources import reject_unused_options
    from thinpipe.train.tasks.splits import Part, at_most, split_fifth
    from thinpipe.train.tasks.task import Batch, Data, Shape, Source, Task, TaskDefaults

__all__ = [
    "Batch",
    "ClientServerSchedule",
    "Codec",
    "DDPState",
    "Data",
    "LinearSchedule",
    "LinkError",
    "LinkReport",
    "Part",
    "PipelineStage",
    "Schedule1F1B",
    "Shape",
    "Source",
    "Task",
    "TaskDefaults",
    "WorkerError",
    "__version__",
    "at_most",
    "choose_cuts",
    "codec",
    "cut",
    "cut_units",
    "ddp_hook",
    "ddp_state",
    "draw",
    "gather_step",
    "measure_units",
    "reject_unused_options",
    "report",
    "reset_counters",
    "run_workers",
    "split_fifth",
    "stages_of",
    "write_chrome_trace",
]

# Module -> its public names, imported on first use: torch takes seconds, and a command line may only want its help.
_LAZY = {
    "thinpipe.codecs": ("Codec", "codec"),
    "thinpipe.ddp": ("DDPState", "ddp_hook", "ddp_state"),
    "thinpipe.train.engines.units": ("cut",),
    "thinpipe.pipeline.partition": ("choose_cuts", "cut_units", "measure_units", "stages_of"),
    "thinpipe.pipeline.report": ("LinkReport", "report", "reset_counters"),
    "thinpipe.pipeline.schedule": ("ClientServerSchedule", "LinearSchedule", "Schedule1F1B"),
    "thinpipe.pipeline.stage": ("PipelineStage",),
    "thinpipe.pipeline.trace": ("draw", "gather_step", "write_chrome_trace"),
    "thinpipe.comm.errors": ("LinkError", "WorkerError"),
    "thinpipe.launch.workers": ("run_workers",),
    "thinpipe.train.tasks.sources": ("reject_unused_options",),
    "thinpipe.train.tasks.splits": ("Part", "at_most", "split_fifth"),
    "thinpipe.train.tasks.task": ("Batch", "Data", "Shape", "Source", "Task", "TaskDefaults"),
}

_RENAMED = {"Recipe": "TaskDefaults"}  # names up to version 0.2

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name on first use."""
        name = _RENAMED.get(name, name)
        for module, names in _LAZY.items():
            if name in names:
                try:
                    return getattr(importlib.import_module(module), name)
                except ModuleNotFoundError as error:
                    line = missing_extra(error)
                    raise error if line is None else ImportError(f"thinpipe.{name}: {line}") from None
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
