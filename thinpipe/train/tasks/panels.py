"""Panels of the help of the trainer's commands, and declarations of options by panel."""

from __future__ import annotations

from functools import partial

from thinpipe.options import option

PANELS = WHAT, WHERE, LINKS, HOW, OUT, SAVE, MACHINES = (  # of the help, in this order
    "Task, data and model",
    "Workers and stages",
    "Links and compression",
    "Training",
    "Output",
    "Checkpoints and export",
    "Several machines, and failures",
)
# Declarations of options by panel.
model_option, stage_option, link_option, training_option, output_option, save_option, machine_option = (
    partial(option, panel=panel) for panel in PANELS
)
task_default_option = partial(training_option, default_text="the task's")
