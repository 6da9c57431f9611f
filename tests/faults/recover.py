"""Faults of servers in runs that continue without them: `python -m tests.faults.recover --count 20 --stations 2`.

A station is a client and three servers in network namespaces. The seed of a case says what strikes which server, when,
and who takes over: a spare, the same server when it comes back, or the one that is left. A case passes if the client
ends with code 0 and the parameters of an undisturbed run, and nobody has started it again. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.train.serve.machines import Command, children_of
from tests.train.serve.nat import Place, internet
from tests.train.tasks.written import write_language_model
from thinpipe.lab.records.record import Record

PATIENCE_S, LIMIT_S = 5, 150
TEXT = "a client keeps the first and the last layers of a model, servers hold those between them; " * 60
DIGITS = ["--samples", "64", "--batch-size", "32", "--chunks", "2", "--epochs", "30", "--image-size", "16"]
LM = ["--model", "llama", "--data", "a.txt", "--lora", "2", "--tokens", "32", "--batch-size", "8", "--chunks", "2"]
LM += ["--samples", "32", "--epochs", "60", "--compress", "none", "--optimizer", "adamw"]
RUNS = {"digits": (DIGITS, 30), "lora": (LM, 60)}  # with the number of epochs
MARK = "case "  # of a line with a result
PARTS = re.compile(r"is done ([\d.]+) s after the last group stopped: (.*); replayed steps: (\d+)")


@dataclass
class Case:
    """One fault of one run, drawn by a seed, and its result."""

    seed: int
    after: str = ""  # who takes over: spare, return, re-cut
    fault: str = ""
    victim: int = 0
    run: str = ""
    epoch: int = 0  # after which it strikes
    delay_s: float = 0.0
    problem: str = ""
    seconds: float = 0.0
    # Seconds from the stop of a group to a step, their parts, and steps replayed.
    recovered: list[tuple[float, str, int]] = field(default_factory=list)

    @staticmethod
    def draw(seed: int) -> Case:
        drawn = random.Random(f"recover {seed}")
        after = drawn.choice(("spare", "return", "re-cut"))
        # A killed process returns at once by its supervisor: no re-cut.
        fault = drawn.choice(("kill all", "stop", "cable") + (() if after == "re-cut" else ("kill",)))
        run = "lora" if after == "re-cut" else drawn.choice(("digits", "lora"))
        case = Case(seed, after, fault, drawn.choice((1, 2)), run, drawn.randrange(RUNS[run][1] * 3 // 4))
        case.delay_s = drawn.uniform(0, 2.0 if case.epoch == 0 else 0.3)
        return case


class Station:
    """A client and three servers, which serve one case after another."""

    def __init__(self, places: dict[str, Place]) -> None:
        self.client = places["client"]
        self.servers = [places[name] for name in ("one", "two", "three")]
        self.serving: list[Command] = []
        for server in self.servers:
            self.serving.append(self._serve(server, "0"))
        write_language_model(self.client.folder / "llama", TEXT)
        (self.client.folder / "a.txt").write_text(TEXT)
        self.tickets = [each.ticket() for each in self.serving]
        self.shas: dict[str, str] = {}

    def _serve(self, server: Place, port: str) -> Command:
        options = ["--listen", f"{server.address}:{port}", "--name", server.folder.name, "--threads", "1"]
        return server.type("serve", *options)

    def train(self, *options: str) -> Command:
        return self.client.type("train", *options, "--threads", "1", "--json", f"{len(self.client.commands)}.json")

    def sha_of(self, command: Command) -> str:
        number = self.client.commands.index(command)
        return str(Record.read(self.client.folder / f"{number}.json").rows[0]["parameters_sha256"])

    def undisturbed(self, run: str) -> str:
        if run not in self.shas:
            command = self.train(*RUNS[run][0], "--workers", "3")
            assert command.wait(LIMIT_S) == 0, command.err
            self.shas[run] = self.sha_of(command)
        return self.shas[run]

    def carry_out(self, case: Case) -> None:
        expected, began = self.undisturbed(case.run), time.monotonic()
        named = self.tickets if case.after == "spare" else self.tickets[:2]
        options = ["--servers", ",".join(named), "--workers", "3", "--mirror-every", "5", "--patience", str(PATIENCE_S)]
        command = self.train(*RUNS[case.run][0], *options, *(["--min-servers", "1"] if case.after == "re-cut" else []))
        undo = threading.Thread(target=lambda: None)
        try:
            command.shows("training from step 0" if case.epoch == 0 else rf"epoch +{case.epoch}/", LIMIT_S)
            time.sleep(case.delay_s)
            self._strike(case)
            undo = threading.Thread(target=self._undo, args=(case,))
            if case.after == "return":
                undo.start()
            code = command.wait(LIMIT_S)
            if code != 0:
                case.problem = f"exit code {code}"
            elif self.sha_of(command) != expected:
                case.problem = "other parameters"
        except (AssertionError, subprocess.TimeoutExpired, OSError) as error:
            case.problem = f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            case.seconds = time.monotonic() - began
            case.recovered = [
                (float(total), parts, int(replayed)) for total, parts, replayed in PARTS.findall(command.err)
            ]
            if case.problem:
                case.problem += "\n" + command.out[-500:] + command.err[-3000:]
            command.end()
            if undo.ident is None:
                self._undo(case, wait_s=0)
            else:
                undo.join()

    def _strike(self, case: Case) -> None:
        serving, server = self.serving[case.victim - 1], self.servers[case.victim - 1]
        children = children_of(serving.process.pid)
        if case.fault == "kill":
            for each in [grand for child in children for grand in children_of(child)][:1]:
                os.kill(each, signal.SIGKILL)
        elif case.fault == "cable":
            server.plug("down")
        else:
            number = signal.SIGKILL if case.fault == "kill all" else signal.SIGSTOP
            for pid in [serving.process.pid, *children]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _undo(self, case: Case, wait_s: float = PATIENCE_S + 2.0) -> None:
        number = case.victim - 1
        serving, server = self.serving[number], self.servers[number]
        if case.fault == "kill all":
            serving.process.wait(20)
            self.serving[number] = self._serve(server, self.tickets[number].split("/")[2].rpartition(":")[2])
            self.serving[number].ticket()
        elif case.fault != "kill":
            time.sleep(wait_s)
            if case.fault == "cable":
                server.plug("up")
            for pid in [serving.process.pid, *children_of(serving.process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def run_station(seeds: list[int], until: float) -> None:
    """Carry out cases, one after another, and print each as a line of JSON."""
    names = dict.fromkeys(("client", "one", "two", "three"), False)
    with tempfile.TemporaryDirectory(prefix="recover-") as folder, internet(Path(folder), names, records=False) as made:
        station = Station(made[0])
        for seed in seeds:
            if time.time() > until:
                return
            case = Case.draw(seed)
            station.carry_out(case)
            print(f"{MARK}{json.dumps(asdict(case))}", flush=True)


def table(cases: list[Case]) -> str:
    """Return the table of results: cases and failures by fault and by who takes over, and the times of recovery."""
    counts = Counter((case.fault, case.after) for case in cases)
    failed = Counter((case.fault, case.after) for case in cases if case.problem)
    lines = ["| fault | spare | return | re-cut |", "|---|---|---|---|"]
    for fault in ("kill", "kill all", "stop", "cable"):
        row = [f"{counts[fault, after]} ({failed[fault, after]} failed)" for after in ("spare", "return", "re-cut")]
        lines.append(f"| {fault} | {' | '.join(row)} |")
    for run in RUNS:
        found = [each for case in cases if case.run == run for each in case.recovered]
        if not found:
            continue
        parts: dict[str, list[float]] = {}
        for _, text, _ in found:
            for each in text.split(", "):
                seconds, _, name = each.partition(" s ")
                parts.setdefault(name, []).append(float(seconds))
        medians = ", ".join(f"{statistics.median(each):.2f} s {name}" for name, each in parts.items())
        totals, replayed = sorted(each[0] for each in found), [each[2] for each in found]
        lines.append(
            f"\n{run}: {len(found)} recoveries, from the stop of a group to the next step: median "
            f"{statistics.median(totals):.2f} s, longest {totals[-1]:.2f} s; medians of the parts: {medians}; "
            f"steps replayed: median {statistics.median(replayed):.0f}, at most {max(replayed)}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.recover", description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="cases (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (0)")
    parser.add_argument("--stations", type=int, default=1, help="cases at a time (1)")
    parser.add_argument("--seconds", type=float, default=1e6, help="no case begins after this time")
    parser.add_argument("--station", metavar="SEED,...", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.station is not None:
        run_station([int(seed) for seed in given.station.split(",")], given.until)
        return 0
    seeds, until = range(given.seed, given.seed + given.count), time.time() + given.seconds
    stations = []
    for number in range(given.stations):
        own = ",".join(map(str, seeds[number :: given.stations]))
        words = [sys.executable, "-m", "tests.faults.recover", "--station", own, "--until", str(until)]
        stations.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
    cases: list[Case] = []

    def read(station: subprocess.Popen[str]) -> None:
        assert station.stdout is not None
        for line in station.stdout:
            if not line.startswith(MARK):
                continue
            case = Case(**json.loads(line.removeprefix(MARK)))
            cases.append(case)
            state = case.problem or "passed"
            place = f"server {case.victim}, {case.run} after epoch {case.epoch} + {case.delay_s:.2f} s"
            print(f"{case.seed}: {case.fault}, {case.after}, {place}: {state}, {case.seconds:.0f} s", flush=True)

    readers = [threading.Thread(target=read, args=(each,)) for each in stations]
    for each in readers:
        each.start()
    for each in readers:
        each.join()
    print(f"\n{len(cases)} cases of {given.count}, {sum(bool(case.problem) for case in cases)} failed\n{table(cases)}")
    return int(any(case.problem for case in cases) or any(each.wait() for each in stations))


if __name__ == "__main__":
    sys.exit(main())
