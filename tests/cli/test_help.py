"""The output of --help at 80 columns."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from thinpipe.cli.app import VERBS, app, load

TEXT_COLUMN = 30  # where texts begin


def help_of(*verb: str, option: str = "--help") -> list[str]:
    result = CliRunner().invoke(app, [*verb, option], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def complete_help_of(verb: str) -> list[str]:
    return help_of(*verb.split(), option="--help-all" if load(verb).advanced else "--help")


def parameters(verb: str) -> list[Any]:
    return [each for each in load(verb).params if not getattr(each, "hidden", False)]


@pytest.mark.parametrize("verb", VERBS)
def test_no_name_metavar_or_text_is_cut(verb: str) -> None:
    lines = complete_help_of(verb)
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80
    names = [line[2:TEXT_COLUMN].strip() if line[TEXT_COLUMN - 1] == " " else line.strip() for line in lines_of(lines)]
    texts = " ".join(" ".join(line[TEXT_COLUMN:] for line in lines if line.startswith("  ")).split())
    for each in parameters(verb):
        assert each.help, each.name
        assert " ".join(each.help.split()) in texts
        flags = " / ".join([*each.opts, *each.secondary_opts])
        if each.param_type_name == "argument":
            assert each.metavar in names
        elif each.metavar:
            assert f"{flags} {each.metavar}" in names
        else:
            assert any(re.fullmatch(rf"{flags}( <[a-z0-9_|-]+>)?", name) for name in names), flags


def lines_of(lines: list[str]) -> list[str]:
    """Those that begin with the name of an option or an argument, padded."""
    start = next(number for number, line in enumerate(lines) if re.match(r"\w.*:$", line) and number)
    return [line.ljust(TEXT_COLUMN) for line in lines[start:] if re.match(r"  \S", line)]


@pytest.mark.parametrize("verb", VERBS)
def test_texts_have_half_of_the_width_and_wrap_at_spaces(verb: str) -> None:
    lines = complete_help_of(verb)
    continued = [line for line in lines if line.startswith(" " * 20)]
    assert continued
    assert {len(line) - len(line.lstrip()) for line in continued} == {TEXT_COLUMN}
    assert not [line for line in lines if line.endswith("-")]


def test_help_of_a_long_command_has_the_common_options_and_names_the_complete_help() -> None:
    short, complete = help_of("train"), help_of("train", option="--help-all")
    named = [line.split()[0] for line in short if line.startswith("  --")]
    assert 25 <= len(named) <= 32
    assert {"--model", "--compress", "--link", "--save", "--servers", "--help-all"} <= set(named)
    assert {"--adam-betas", "--capture-limit", "--keep"}.isdisjoint(named)
    assert all(line in complete for line in short if line.startswith("  --"))
    assert len([line for line in complete if line.startswith("  --")]) > 70
    assert "--help-all" not in "".join(help_of("generate"))  # all of its options are on one page
    wrong = CliRunner().invoke(app, ["train", "--epoch", "3"])
    assert wrong.exit_code == 2
    assert "--help-all' for help" in wrong.stderr


@pytest.mark.parametrize(
    ("group", "verbs"),
    [((), [*(v for v in VERBS if " " not in v), "bench"]), (("bench",), [v.split()[1] for v in VERBS if " " in v])],
)
def test_a_group_lists_its_verbs_with_complete_summaries(group: tuple[str, ...], verbs: list[str]) -> None:
    lines = help_of(*group)
    text = " ".join(" ".join(lines).split())
    for verb in verbs:
        assert any(line.startswith(f"  {verb} ") for line in lines)
        summary = VERBS.get(" ".join([*group, verb]))
        assert summary is None or summary[1] in text


def test_evaluate_has_no_options_of_training_alone() -> None:
    names = {each.name for each in load("evaluate").params}
    assert {"task", "data", "model", "samples", "run", "adapter"} <= names
    assert not names & {"lora", "lora_target", "lora_alpha", "lora_dropout", "freeze", "lr", "epochs"}


def test_evaluate_rejects_samples_of_the_validation_part() -> None:
    done = CliRunner().invoke(app, ["evaluate", "--parallel", "none", "--samples", "8"])
    assert done.exit_code == 2
    assert done.stderr == (
        "thinpipe: --samples limits the training samples: give --part train with it, or leave it out\n"
    )
