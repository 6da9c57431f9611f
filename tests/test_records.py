"""Records in benchmarks/: each is cited, its presets mean what they mean today, and tables have its numbers."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from tests.documents import RECORDS, ROOT, Table, links, tables
from thinpipe import codec
from thinpipe.codecs.recipes import RECIPES, directions

CITING = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = sorted(page.parent for page in RECORDS.glob("*/README.md"))
PRESET = re.compile(r"^- `(\w+)` = `([^`]+)` / `([^`]+)`$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.:])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?(?![\w:]|\.\d)")
CHECKSUM = 8  # bytes in addition to every wire

by_name = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def load(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / name).read_text())
    return record


def spans(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def numbers(text: str) -> Iterator[tuple[float, float]]:
    """Yield the numbers of a cell and half a unit of their last digit; code spans are skipped."""
    for found in NUMBER.findall(re.sub(r"`[^`]*`", "", text)):
        digits, _, exponent = found.replace(",", "").partition("e")
        decimals = len(digits.partition(".")[2])
        yield float(found.replace(",", "")), 0.5001 * 10.0 ** (int(exponent or 0) - decimals)


def contains(values: set[float], number: float, tolerance: float) -> bool:
    return any(abs(value - number) <= tolerance for value in values)


# --- files ---


@by_name
def test_every_file_of_a_folder_is_named_by_its_page_and_the_folder_is_cited(folder: Path) -> None:
    named = spans((folder / "README.md").read_text()) | set(links(folder / "README.md"))
    files = {path.name for path in folder.iterdir()} - {"README.md", "record.json"}
    assert not [file for file in sorted(files) if not any(fnmatch(file, name) for name in named)]
    cited = [page for page in CITING if any(f"benchmarks/{folder.name}/README.md" in link for link in links(page))]
    assert cited, "no page cites these records: delete them"
    assert f"{folder.name}/README.md" in links(RECORDS / "README.md")


def test_nothing_lies_outside_of_the_folders_but_scripts_that_the_index_names() -> None:
    index = spans((RECORDS / "README.md").read_text())
    assert {path.name for path in RECORDS.iterdir() if path.is_file()} - {"README.md"} <= index
    assert {path for path in RECORDS.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(FOLDERS)


@by_name
def test_a_page_has_result_environment_and_command(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Result", "Environment", "Command"]
    assert "```" in text.partition("## Command")[2]


def test_plans_are_cited() -> None:
    text = "".join(page.read_text() for page in [*CITING, *RECORDS.glob("*/README.md")])
    assert not [plan.name for plan in (ROOT / "ablations").glob("*.toml") if f"ablations/{plan.name}" not in text]


# --- presets ---


@by_name
def test_presets_are_those_of_today(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    stated = {name: (forward, backward) for name, forward, backward in PRESET.findall(text)}
    assert stated == {name: directions(name) for name in stated}
    in_tables = {cell for table in tables(folder / "README.md") for row in table.rows for cell in spans(" ".join(row))}
    assert in_tables & set(RECIPES) <= set(stated)


RESULTS = {  # record -> file with its runs
    "language_model/finetuned": "finetuned.results",
    "language_model/scratch": "scratch.results",
    "language_model/scratch_16_seeds": "scratch.results",
    "language_model/scratch_32_seeds": "scratch.results",
    "language_model/documentation": "documentation.results",
    "lora_accuracy/all_weights": "all_weights.results",
    "lora_accuracy/lora": "lora.results",
    "fashion_mnist/presets": "results",
    "fashion_mnist/thirteen_seeds": "results",
}


@pytest.mark.parametrize("name", RESULTS)
def test_rows_are_of_runs_with_the_codecs_that_their_presets_name_today(name: str) -> None:
    results = (RECORDS / name).parent / f"{RESULTS[name]}.jsonl"
    runs: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for line in results.read_text().splitlines():
        run = json.loads(line)
        used = run["settings"]
        runs[used["compress_forward"], used["compress_backward"]][used["seed"]] = run["figures"]["metric"]
    rows = [row for row in load(f"{name}.json")["rows"] if row["codec"] in RECIPES]
    assert rows
    for row in rows:
        metrics = [runs[directions(row["codec"])][seed] for seed in range(row["seeds_done"])]
        metric = next(key for key in row if key.endswith("_mean"))
        assert row[metric] == pytest.approx(mean(metrics), rel=1e-9)


@pytest.mark.parametrize("preset", ["8bit", "4bit"])
def test_the_pipeline_sent_the_wires_of_the_presets(preset: str) -> None:
    record = load("pipeline_lm/record.json")
    sizes = [codec(spec).wire_bytes((1, 256, 256), torch.float32) + CHECKSUM for spec in directions(preset)]
    rows = [row for row in record["rows"] if row["codec"] == preset]
    assert {row["wire_bytes"] for row in rows} == {2 * 8 * sum(sizes)}  # two cuts, 8 microbatches


# --- numbers ---


def rows_of(path: Path) -> dict[str, list[dict[str, float]]]:
    """Return the numbers of the rows of a record by codec, with those that pages derive from them."""
    found = defaultdict(list)
    record = json.loads(path.read_text())
    shapes = record["config"].get("shapes", {})
    for row in record["rows"]:
        values = {name: float(value) for name, value in _flat(row) if isinstance(value, int | float)}
        if "tensor_bytes" in values and "wire_bytes" in values:
            values["bits"] = 32 * values["wire_bytes"] / values["tensor_bytes"]
        if shapes.get("tokens") and values.get("samples_per_s"):
            values["tokens_per_s"] = values["samples_per_s"] * shapes["tokens"]
            values["most_tokens_per_s"] = 1000 * shapes["tokens"] * shapes["batch_size"] / values["bound_ms"]
        found[str(row.get("codec") or record["config"].get("compress") or "none")].append(values)
    return found


def _flat(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name == "per_worker":
            for worker in value:
                yield from ((f"{each}_{worker['worker']}", worker[each]) for each in worker)
        else:
            yield name, value


def values_of(rows: list[dict[str, float]]) -> set[float]:
    """Return the numbers of rows, in percent too, and mean and spread of each column."""
    columns = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[name].append(value)
    found = {value for column in columns.values() for value in column}
    found |= {mean(column) for column in columns.values()}
    found |= {stdev(column) for column in columns.values() if len(column) > 1}
    return found | {100 * value for value in found}


RECORDED = [each for each in FOLDERS if any(each.glob("*.json")) and not any(each.glob("*-0.json"))]


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
def test_tables_of_a_page_have_the_numbers_of_its_records(folder: Path) -> None:
    records = [rows_of(path) for path in sorted(folder.glob("*.json"))]
    codecs = {name for record in records for name in record}
    for table in tables(folder / "README.md"):
        if "No JSON record" in table.before:
            continue
        for row in table.rows:
            names = spans(" ".join(row)) & codecs or codecs
            known = set().union(*(values_of(record[name]) for record in records for name in names if name in record))
            for cell in row:
                for number, tolerance in numbers(cell):
                    assert contains(known, number, tolerance) or cell in LINKS, (row, cell)


LINKS = {"20 Mbit/s", "5 Mbit/s"}


def test_runs_of_a_pipeline_end_like_those_of_one_process() -> None:
    folder = RECORDS / "pipeline_vs_one_process"
    (table,) = tables(folder / "README.md")
    for name, row in zip(("one", "none", "8bit"), table.rows, strict=True):
        ends = [json.loads(path.read_text())["rows"][0]["epochs"][-1] for path in sorted(folder.glob(f"{name}-?.json"))]
        losses = [end["validation_loss"] for end in ends]
        assert row[3] == f"{mean(losses):.4f} ± {stdev(losses):.4f}"


def cited_tables() -> list[tuple[Path, Table, list[str]]]:
    """Return the tables of pages after a paragraph with a link ``record``, and the folders that it names."""
    found = []
    for page in CITING:
        for table in tables(page):
            if folders := re.findall(r"\[record\]\([./]*benchmarks/(\w+)/README\.md", table.before):
                found.append((page, table, folders))
    return found


def test_pages_have_tables_with_records() -> None:
    assert len(cited_tables()) >= 8


@pytest.mark.parametrize(
    ("page", "table", "folders"), cited_tables(), ids=lambda x: x.name if isinstance(x, Path) else ""
)
def test_numbers_of_a_page_are_in_the_records_it_cites(page: Path, table: Table, folders: list[str]) -> None:
    recorded = [row for folder in folders for each in tables(RECORDS / folder / "README.md") for row in each.rows]
    names = {cell for row in recorded for cell in row if not re.fullmatch(r"[\d.,+\-e ±%]*", cell)}
    for row in table.rows:
        for heading, cell in zip(table.heads, row, strict=True):
            keys = {text for text in (row[0], heading) if text in names}
            known = {value for each in recorded if keys <= set(each) for part in each for value, _ in numbers(part)}
            for number, tolerance in numbers(cell):
                assert contains(known, number, tolerance) or cell in names | SEEDS, (page.name, row, cell)


SEEDS = {"3", "5", "13", "16", "32"}  # checked below for the README


def test_the_accuracy_table_of_the_readme() -> None:
    """Each column of each row, from the record with the most seeds."""
    (table,) = [each for each in tables(ROOT / "README.md") if "fine-tuned" in each.heads]
    files = {"8bit": "scratch_16_seeds", "4bit": "scratch_32_seeds"}
    for row in table.rows:
        (name,) = spans(row[0])
        tuned = row_of("language_model/finetuned.json", name)
        scratch = row_of(f"language_model/{files.get(name, 'scratch')}.json", name)
        fashion = row_of(f"fashion_mnist/{'thirteen_seeds' if name in ('none', '4bit') else 'presets'}.json", name)
        cells = [f"`{name}`", f"{tuned['bits_per_value']:.2f}"]
        for each in (tuned, scratch):
            cells += ["", ""] if name == "none" else [f"{each['loss_added']:.4f}", str(each["seeds_done"])]
        cells.append(f"{100 * fashion['accuracy_mean']:.1f} ± {100 * fashion['accuracy_std']:.1f} %")
        assert row == [*cells, str(fashion["seeds_done"])]


def row_of(file: str, name: str) -> dict[str, Any]:
    (row,) = [row for row in load(file)["rows"] if row["codec"] == name]
    return dict(row)


def test_the_speed_table_of_the_readme() -> None:
    found = [each for each in tables(ROOT / "README.md") if each.heads[0] == "link"]
    for table, name in zip(found, ("pipeline_lm", "against_torch"), strict=True):
        record = load(f"{name}/record.json")
        speeds = {(row["link"], row["stage"] or row["codec"]): row["samples_per_s"] * 256 for row in record["rows"]}
        for row in table.rows:
            link = row[0].strip("`").replace(" Mbit/s", "mbit").replace("loopback", "none")
            assert row[1:] == [f"{speeds[link, heading.strip('`')]:,.0f}" for heading in table.heads[1:]]


def test_the_prose_of_the_readme_has_numbers_of_the_records_it_cites() -> None:
    """Large and fractional numbers: small whole ones count machines, layers and bits."""
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    checked = 0
    for sentence in re.split(r"(?<=[.:])\s", text):
        for folder in re.findall(r"\[record\]\(benchmarks/(\w+)/README\.md", sentence):
            recorded = {value for value, _ in numbers((RECORDS / folder / "README.md").read_text())}
            given = [each for each in numbers(re.sub(r"\]\(.*?\)", "]", sentence)) if each[0] >= 100 or each[0] % 1]
            assert not [value for value, tolerance in given if not contains(recorded, value, tolerance)], sentence
            checked += len(given)
    assert checked >= 4


def test_the_readme_has_the_bits_of_the_speed_table_and_the_number_of_model_types() -> None:
    text = (ROOT / "README.md").read_text()
    rows = load("pipeline_lm/record.json")["rows"]
    bits = {row["codec"]: f"{32 * row['wire_bytes'] / row['tensor_bytes']:.2f}" for row in rows if row["wire_bytes"]}
    assert f"they send {bits['3bit']}, {bits['2bit']} and {bits['1bit']} bits in the speed table" in text
    verified = json.loads((ROOT / "thinpipe" / "train" / "models" / "verified.json").read_text())["rows"]
    assert f"{len({row['type'] for row in verified if row['outcome'] == 'exact'})} model types" in text
