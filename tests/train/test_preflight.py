"""Output files of a run are tested before it starts."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from thinpipe.options import flags_in_errors
from thinpipe.train.preflight import check_space, preflight

MOUNTED = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
PROBE = """
import sys
from pathlib import Path
from thinpipe.options import flags_in_errors
from thinpipe.train.preflight import check_space, preflight

root = Path(sys.argv[1])
for outputs in (
    {"log": root / "full" / "a"},
    {"save": root / "small"},
    {"log": root / "read_only"},
):
    try:
        preflight(**outputs)
        with flags_in_errors():
            check_space(outputs, {"save": 20_000_000})
    except ValueError as error:
        print(error)
"""


def can_mount(directory: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*MOUNTED, f"mount -t tmpfs none {directory}"], capture_output=True).returncode == 0


def everything(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


def test_directories_are_made_and_nothing_else_is_left(tmp_path):
    preflight(
        log=tmp_path / "logs" / "a",
        save=tmp_path / "save",
        json=tmp_path / "out" / "r.json",
        trace=tmp_path / "t.json",
        capture=tmp_path / "out" / "c.safetensors",
        export=tmp_path / "out" / "model",
    )
    assert everything(tmp_path) == [tmp_path / name for name in ("logs", "logs/a", "out", "save")]


def test_existing_files_are_kept(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events").write_text("kept")
    (tmp_path / "r.json").write_text("kept")
    preflight(log=tmp_path / "run", json=tmp_path / "r.json")
    assert (tmp_path / "run" / "events").read_text() == (tmp_path / "r.json").read_text() == "kept"
    assert len(everything(tmp_path)) == 3


def test_paths_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    preflight(log=Path("logs"), json=Path("r.json"), save=Path("a/b"))
    assert everything(tmp_path) == [tmp_path / name for name in ("a", "a/b", "logs")]


@pytest.mark.parametrize(
    ("outputs", "rule"),
    [
        ({"log": "file"}, "--log needs a directory that is there or can be made; .*file: Not a directory"),
        ({"save": "file/below"}, "--save needs a directory that is there or can be made; .*Not a directory"),
        ({"json": "file/r.json"}, "--json needs a directory"),
        ({"trace": "file/deep/t.json"}, "--trace needs a directory"),
        ({"json": "folder"}, "results go to a file, this is a directory"),
        ({"json": "/dev/full"}, "this is a device or a pipe"),
        ({"log": "/proc/none/logs"}, "--log needs a directory that is there or can be made; /proc/none"),
        ({"log": "dangling"}, "--log needs a directory"),
        ({"export": "file"}, "a model is written into a new folder, and .*file is something else"),
        ({"export": "taken"}, "a model is written into a new folder, and .*taken is there and not empty"),
        ({"export": "file/below"}, "--export needs a directory that is there or can be made"),
    ],
    ids=lambda value: "-".join(f"{k}-{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_unwritable_outputs_are_named_and_nothing_is_left(outputs, rule, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken" / "mine").mkdir(parents=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = everything(tmp_path)
    good = {"save": tmp_path / "made" / "first"} if "save" not in outputs else {"log": tmp_path / "made" / "first"}
    with pytest.raises(ValueError, match=rule):
        preflight(**good, **{name: tmp_path / path for name, path in outputs.items()})
    assert everything(tmp_path) == before
    assert Path("/dev/full").is_char_device()


def test_checkpoints_that_do_not_fit_are_an_error(tmp_path):
    sizes = {"save": 2 * shutil.disk_usage(tmp_path).free, "capture": 10}
    outputs = {"save": tmp_path / "save", "capture": tmp_path / "made" / "later" / "c.safetensors", "export": None}
    rule = r"--save and --capture will need .* MB in .*, where .* MB are free\. .*keep fewer checkpoints"
    with flags_in_errors(), pytest.raises(ValueError, match=rule) as error:
        check_space(outputs, sizes)
    assert "Free some space" in str(error.value)
    check_space({**outputs, "save": None}, sizes)
    assert everything(tmp_path) == []


@pytest.mark.timeout(60)
def test_full_small_and_read_only_disks_are_errors(tmp_path):
    if not can_mount(tmp_path):
        pytest.skip("this machine lets nobody mount a file system")
    mounts = []
    for name, options in (("full", "size=4k"), ("small", "size=8m"), ("read_only", "ro")):
        (tmp_path / name).mkdir()
        mounts.append(f"mount -t tmpfs -o {options} none {tmp_path / name}")
    fill = f"head -c 4096 /dev/zero > {tmp_path}/full/all"
    script = "; ".join([*mounts, fill, 'exec "$0" -c "$1" "$2"'])
    command = [*MOUNTED, script, sys.executable, PROBE, str(tmp_path)]
    full, small, read_only = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert full.startswith(f"--log needs a directory that can be written; {tmp_path}/full/a: No space left on device")
    assert small.startswith(f"--save will need 20.0 MB in {tmp_path}/small, where 8.4 MB are free")
    assert read_only.startswith(
        f"--log needs a directory that can be written; {tmp_path}/read_only: Read-only file system"
    )
