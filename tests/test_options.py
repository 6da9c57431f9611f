"""Options declared once: rules, names in errors, reading from text, and the command that follows from them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from thinpipe.cli.terminal import one_line_errors, takes
from thinpipe.options import (
    OptionError,
    above,
    check,
    flags_in_errors,
    from_facts,
    like,
    nearest,
    option,
    options_of,
    pair,
    read,
)

PACKAGE = Path(__file__).parent.parent / "thinpipe"


def halves(text: str) -> tuple[int, int]:
    first, slash, second = text.partition("/")
    if not slash:
        raise OptionError(f"{{cut_at}} is two numbers, as in 1/2; got {text}")
    return int(first), int(second)


@dataclass(frozen=True, kw_only=True)
class Baking:
    heat: float = option(
        "Of the oven; see {cut_at}.",
        panel="How",
        metavar="C",
        rule=above(0, 300),
        default_value=180,
        aliases=("temperature",),
    )
    fan: Literal["on", "off"] = option(
        "Whether it blows.",
        panel="How",
        kind=Literal["on", "off", "still"],
        default_value="off",
        movable=True,
        synonyms={"still": "off"},
    )
    at: tuple[int, int] | None = option("Where it is cut.", panel="What", name="cut_at", parse=halves, default=None)
    turn: bool = option("Upside down.", panel="How", default=False, aliases=("flip",), at_end=True)

    def __post_init__(self) -> None:
        check(self)


def test_an_option_of_another_dataclass_can_override_its_metadata() -> None:
    @dataclass(frozen=True)
    class Frying:
        heat: float = like(Baking, "heat", panel="Where", default=150.0)
        blows: Literal["on", "off"] = like(Baking, "fan", default="on")

        def __post_init__(self) -> None:
            check(self)

    assert (Frying().heat, Frying().blows) == (150.0, "on")
    heat, blows = options_of(Frying)["heat"], options_of(Frying)["blows"]
    assert (heat.panel, heat.default_value, heat.help) == ("Where", 150.0, options_of(Baking)["heat"].help)
    assert (blows.name, blows.movable) == ("fan", True)
    with pytest.raises(OptionError, match=r"^heat is above 0 and at most 300; got 301$"):
        Frying(heat=301)


def test_rules_name_python_keywords_or_flags() -> None:
    with pytest.raises(OptionError, match=r"^heat is above 0 and at most 300; got 0$") as error:
        Baking(heat=0, fan="on")
    with flags_in_errors():
        assert str(error.value) == "--heat is above 0 and at most 300; got 0"
        assert str(OptionError("leave out {cut_at} and {no_turn}")) == "leave out --cut-at and --no-turn"
    assert str(OptionError("leave out {cut_at} and {no_turn}")) == "leave out cut_at and turn=False"
    with pytest.raises(OptionError, match=r"^fan is on, off; got maybe$"):
        Baking(heat=1, fan="maybe")  # type: ignore[arg-type]


def test_fields_are_read_by_user_names_and_missing_ones_left_out() -> None:
    assert read(Baking, {"cut_at": "3/4", "heat": 20.5, "fan": None, "other": 1}) == {"at": (3, 4), "heat": 20.5}
    assert read(Baking, {"cut_at": (3, 4)}) == {"at": (3, 4)}
    with pytest.raises(OptionError, match="cut_at is two numbers"):
        read(Baking, {"cut_at": "34"})
    assert [name for name, told in options_of(Baking).items() if told.movable] == ["fan"]


def run(*words: str) -> tuple[int, str, dict[str, Any]]:
    heard: dict[str, Any] = {}

    @takes(Baking, panels=("What", "How"))
    def bake(**given: Any) -> None:
        """Bake a cake."""
        with one_line_errors():
            heard.update(vars(Baking(**{"heat": 180, "fan": "off", **read(Baking, given)})))

    app = typer.Typer(rich_markup_mode=None)
    app.command()(bake)
    result = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
    return result.exit_code, result.output, heard


def test_a_command_has_the_declared_options() -> None:
    assert run("--cut-at", "1/2", "--turn", "--fan", "on") == (
        0,
        "",
        {"heat": 180, "fan": "on", "at": (1, 2), "turn": True},
    )
    assert run("--heat", "0")[:2] == (2, "thinpipe: --heat is above 0 and at most 300; got 0.0\n")
    assert run("--cut-at", "12")[:2] == (2, "thinpipe: --cut-at is two numbers, as in 1/2; got 12\n")
    code, output, _ = run("--help")
    assert code == 0
    assert re.search(r"Of the oven;\s+see\s+--cut-at\.\s+Also\s+--temperature\.\s+\[default:\s+180\]", output)
    flags = [word for word in re.findall(r"--[a-z-]+", output) if word in ("--cut-at", "--heat", "--fan", "--turn")]
    assert list(dict.fromkeys(flags)) == ["--cut-at", "--heat", "--fan", "--turn"]


def test_an_alias_is_the_option_and_errors_name_the_alias() -> None:
    assert run("--temperature", "20", "--flip")[2] == {"heat": 20.0, "fan": "off", "at": None, "turn": True}
    assert run("--temperature", "0")[:2] == (2, "thinpipe: --temperature is above 0 and at most 300; got 0.0\n")
    assert run("--heat", "0")[1] == "thinpipe: --heat is above 0 and at most 300; got 0.0\n"  # in the next command
    both = "thinpipe: --heat and --temperature are the same option: give one of them\n"
    assert run("--temperature", "20", "--heat", "20")[:2] == (2, both)
    assert not re.search(r"^│ +--(temperature|flip)", run("--help")[1], re.MULTILINE)  # no lines of their own


def test_a_synonym_of_a_value_is_read_as_the_value_also_from_json() -> None:
    assert run("--fan", "still")[2]["fan"] == "off"
    assert read(Baking, {"fan": "still"}) == {"fan": "off"}
    assert from_facts(Baking, {"heat": 20.0, "fan": "still"}, "its settings").fan == "off"
    with pytest.raises(ValueError, match="fan cannot be"):
        from_facts(Baking, {"heat": 20.0, "fan": ["still"]}, "its settings")
    with pytest.raises(OptionError, match=r"^fan is on, off; got still$"):
        Baking(heat=1, fan="still")  # type: ignore[arg-type]


def test_a_pair_of_numbers_is_read_and_shown_as_it_is_written() -> None:
    @dataclass(frozen=True)
    class Icing:
        parts: tuple[float, float] = option(
            "Of sugar and water.", panel="How", parse=pair("parts", float, "2,0.5"), default=(2.0, 0.25)
        )

    @takes(Icing, panels=("How",))
    def ice(**given: Any) -> None:
        """Ice a cake."""

    assert read(Icing, {"parts": "3, 1e-1"}) == {"parts": (3.0, 0.1)}
    for text in ("3", "3,", "3,x", "1,2,3"):
        with pytest.raises(OptionError, match=f"^parts is two numbers, as in 2,0.5; got {text}$"):
            read(Icing, {"parts": text})
    app = typer.Typer(rich_markup_mode=None)
    app.command()(ice)
    assert "[default: 2.0,0.25]" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output


# Flags of other programs: torchrun's, `hf download`'s; of thinpipe, where a command is written out.
OTHER_PROGRAMS = re.compile(r"--(repo-type|local-dir|include) |thinpipe \.\.\.")


def flags_in_texts(path: Path) -> list[str]:
    """Texts in the code that name a flag, docstrings aside."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if re.search(r"(?<![\w-])--[a-z]", node.value) and not OTHER_PROGRAMS.search(node.value)
    ]


def test_only_the_command_line_names_flags() -> None:
    library = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if (name := str(path.relative_to(PACKAGE))) != "options.py" and not name.startswith("cli/")
    ]
    assert len(library) > 50
    assert [found for path in library for found in flags_in_texts(path)] == []


def test_the_nearest_name_is_suggested() -> None:
    assert nearest("digit", ["rte", "digits", "images"]) == " (did you mean digits?)"
    assert nearest("zzz", ["rte", "digits"]) == nearest("a", []) == ""
