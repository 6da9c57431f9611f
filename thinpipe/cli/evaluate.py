"""thinpipe evaluate: loss and accuracy of a model, a run or adapters on a data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thinpipe.cli.command_runner import CommandOptions, is_client, resolving, run_once, write_record
from thinpipe.cli.terminal import takes
from thinpipe.cli.train import TrainOptions
from thinpipe.comm.membership import is_served, member
from thinpipe.options import OptionError, like, options_of, read
from thinpipe.system.files import check_writable
from thinpipe.train.checkpoints.best import follow_best
from thinpipe.train.generation.settings import GenerationSettings
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings, Trained
from thinpipe.train.tasks.panels import HOW, PANELS, WHAT, model_option

KIND = "evaluate"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(CommandOptions):
    """The options in addition to those of a run."""

    run: Path | None = model_option(
        "Folder of checkpoints of a run, one checkpoint, or DIR/best; its weights, data and options are used.",
        metavar="DIR",
        kind=Path,
        parse=follow_best,
        default=None,
    )
    adapter: str | None = like(GenerationSettings, "adapter", panel=WHAT, default=None)
    part: Literal["validation", "train"] = model_option("Part of the data to evaluate.", default="validation")
    compress: str | None = like(
        TrainOptions, "compress", help="Codec of activations, or a preset, as in 4bit.", default=None
    )


_OF_MODEL = [each for each in options_of(Trained).values() if not each.training_only]
_OF_RUN = [each for each in options_of(Settings).values() if each.evaluates]
_OF_EXECUTION = [options_of(RunOptions)[name] for name in ("link", "patience_s")]


@takes(EvaluateOptions, _OF_MODEL, _OF_RUN, _OF_EXECUTION, panels=PANELS, titles={HOW: "Evaluation"})
def evaluate(**given: Any) -> None:
    """Compute loss and accuracy of a model, a run or an adapter.

    Runs the pipeline and the codecs of training, or one process, without
    gradients and optimizer. For texts also perplexity and bits per byte.

    On several machines: thinpipe serve --listen HOST:PORT on each server, then
    thinpipe evaluate ... --servers TICKET,TICKET. On a trusted network also, on
    each: thinpipe evaluate ... --workers 3 --rank N --master HOST:PORT

    Example: thinpipe evaluate --run run/ --compress 4bit
    """
    from thinpipe.lab.netem.network import check_launch
    from thinpipe.lab.runs.evaluation import EvaluationColumns, show
    from thinpipe.train.data import check_possible
    from thinpipe.train.evaluation import evaluate_on_worker
    from thinpipe.train.models.saved_adapter import SavedAdapter
    from thinpipe.train.resolve import resolve_evaluation
    from thinpipe.train.tasks.tasks import task as find_task

    with resolving(EvaluateOptions, given) as options:
        adapter = None if options.adapter is None else SavedAdapter(Path(options.adapter))
        settings = resolve_evaluation(options.run, given, adapter)
        if given["samples"] is not None and options.part != "train":
            raise OptionError("{samples} limits the training samples: give {part} train with it, or leave it out")
        running = RunOptions(**read(RunOptions, given))
        running.check_with(settings)
        check_launch([settings.workers], [running.link])
        if member() is None or is_served():
            check_possible(find_task(settings.task), settings, adapter)
        if options.json is not None and is_client():
            check_writable(options.json)

    def report(result: Any) -> int:
        row = EvaluationColumns.of(settings, options.part, result)
        show(row)
        config = {**settings.to_json(), "run": options.run and str(options.run), "adapter": options.adapter}
        given_only = {name: value for name, value in config.items() if value is not None}
        return write_record(options.json, KIND, given_only, [row])

    arguments = (settings, options.run, adapter, options.part)
    run_once(report, evaluate_on_worker, *arguments, processes=settings.workers, running=running)
