"""Breaks one line at a time in a copy of the repository, and runs the tests that execute it.

    python tests/mutation/mutate.py simulator runtime --mutants 60 --seed 7

cosmic-ray makes the breakages. `docs/mutation.md` explains the output.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import marks
from breakages import breakages, plain
from cosmic_ray.mutating import mutate_code
from forks import import_before, run_pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".mutation"
TESTS = (
    "simulator",
    "runtime",
    "properties",
    "experiments/training/test_train.py",
    "experiments/training/test_resume.py",
    "experiments/training/test_export.py",
    "experiments/training/test_chat.py",
    "experiments/training/test_convert.py",
)
READERS = {
    "simulator/model/families/": "tests/simulator/model/test_family_defaults.py",
    "runtime/optimizer/settings.py": "tests/runtime/training/test_config.py",
    "runtime/data/options.py": "tests/runtime/training/test_config.py",
    "runtime/training/config.py": "tests/runtime/training/test_config.py",
}
"""Tests that read the tables or classes of modules and may execute none of their functions."""
KINDS = ("killed", "survived", "equivalent", "unreached")


class Breakage:
    """One small change of a module.

    `before` and `after` are the stripped line before and after the change.
    """

    def __init__(self, path: str, line: int, operator: Any, occurrence: int) -> None:
        self.path, self.line = path, line
        self.source = (ROOT / path).read_text()
        self.code = mutate_code(self.source, operator, occurrence)
        lines, broken = self.source.splitlines(), self.code.splitlines()
        self.before, self.after = lines[line - 1].strip(), broken[line - 1].strip()

    @property
    def changes(self) -> bool:
        return plain(self.code) not in (None, plain(self.source))

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


def draw(path: str, count: int, seed: int) -> list[Breakage]:
    """Returns about `count` breakages of a folder or module.

    Lines are drawn at equal distances from all modules, with the lines of a module shuffled. Each
    line gets one random breakage.
    """
    chance = random.Random(seed)
    lines = []
    for module in [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).glob("**/*.py")):
        inside = list(breakages(module).items())
        chance.shuffle(inside)
        lines += [(str(module.relative_to(ROOT)), line, choices) for line, choices in inside]
    first, step = chance.random(), len(lines) / count
    chosen = [lines[int((first + index) * step)] for index in range(count)]
    drawn = [Breakage(module, line, *chance.choice(choices)) for module, line, choices in chosen]
    return [breakage for breakage in drawn if breakage.changes]


class Copy:
    """A copy of the repository whose modules can be replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._writes = folder, 0
        ignored = shutil.ignore_patterns(".git", ".venv", ".mutation", ".hypothesis")
        shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored)

    def write(self, path: str, code: str) -> None:
        # Python compiles a module again only if its size or its time in seconds has changed.
        self._writes += 1
        (self.folder / path).write_text(code)
        os.utime(self.folder / path, (self._writes, self._writes))


def record(drawn: list[Breakage], copy: Copy, files: list[str], into: Path) -> None:
    """Runs each test file without a record, and records which tests reach which breakage."""
    into.mkdir(parents=True, exist_ok=True)
    (copy.folder / "typings" / "mutation_marks.py").write_text(marks.MODULE)
    for path in {breakage.path for breakage in drawn}:
        numbers: dict[int, list[int]] = {}
        for number, breakage in enumerate(drawn):
            if breakage.path == path:
                numbers.setdefault(breakage.line, []).append(number)
        copy.write(path, marks.marked((ROOT / path).read_text(), numbers))
    for file in files:
        base = into / file.replace("/", ".")
        report, running = base.with_suffix(".xml"), base.with_suffix(".running.xml")
        if report.exists():
            continue
        print(f"recording {file}", flush=True)
        base.with_suffix(".marks").unlink(missing_ok=True)
        os.environ["MUTATION_MARKS"] = str(base.with_suffix(".marks"))
        words = [file, f"--junitxml={running}", "-o", "junit_family=xunit1"]
        run_pytest(words, copy.folder, base.with_suffix(".txt"), 3600)
        running.rename(report)


class Executing:
    """The recorded tests that execute each breakage.

    Code that a fixture executes counts for every test of its file. The tests of `READERS` count for
    every breakage of their modules.
    """

    def __init__(self, recorded: Path, drawn: list[Breakage]) -> None:
        self.seconds: dict[str, float] = {}
        """Duration of each test that passed."""
        self.reached: dict[int, set[str]] = {}
        for report in sorted(recorded.glob("*.xml")):
            if report.name.endswith(".running.xml"):
                continue
            passed = {
                _id(case): float(case.attrib["time"])
                for case in ElementTree.parse(report).iter("testcase")
                if {part.tag for part in case} <= {"properties", "system-out", "system-err"}
            }
            self.seconds |= passed
            for number, test, phase in marks.read(report.with_suffix(".marks")):
                self.reached.setdefault(number, set()).update(
                    {test} & passed.keys() if phase == "call" else passed
                )
        self.readers: dict[int, set[str]] = {}
        for number, breakage in enumerate(drawn):
            for modules, reader in READERS.items():
                if breakage.path.startswith(modules):
                    tests = {test for test in self.seconds if test.startswith(f"{reader}::")}
                    self.readers.setdefault(number, set()).update(tests)
                    self.reached.setdefault(number, set()).update(tests)
        self.width = Counter(test for tests in self.reached.values() for test in tests)

    def tests(self, number: int) -> list[str]:
        """Returns the tests that execute a breakage. Those of `READERS` come first, and then tests
        with few breakages.
        """
        readers = self.readers.get(number, set())
        return sorted(
            self.reached.get(number, ()),
            key=lambda test: (test not in readers, self.width[test], self.seconds[test]),
        )

    def within(self, tests: list[str], limit_s: float) -> list[str]:
        """Returns the first of `tests` that together take at most `limit_s`, and at least three."""
        ends = accumulate(self.seconds[test] for test in tests)
        return [
            test
            for count, (test, end) in enumerate(zip(tests, ends, strict=True))
            if count < 3 or end <= limit_s
        ]

    def limit_s(self, tests: list[str]) -> float:
        """Returns the time after which a run of `tests` is said to hang."""
        return 60 + 4 * sum(self.seconds[test] for test in tests)


def _id(case: ElementTree.Element) -> str:
    file, name = case.attrib["file"], case.attrib["name"]
    inner = (
        case.attrib["classname"].removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    )
    return "::".join(part for part in (file, inner, name) if part)


def run(
    drawn: list[Breakage], copy: Copy, executing: Executing, seconds: float, into: Path
) -> list[str]:
    """Prints a line for each breakage, and returns the outcomes.

    Runs are stored. A noticed breakage is not run again, and any other is only run with further
    tests. The order is random, so the first lines of an interrupted run are a random sample too.
    """
    named = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())["equivalent"]
    equivalent = {(entry["file"], entry["before"], entry["after"]) for entry in named}
    known = json.loads(into.read_text()) if into.exists() else {}
    outcomes = [""] * len(drawn)
    order = list(enumerate(drawn))
    random.Random(len(drawn)).shuffle(order)
    for number, breakage in order:
        noticed, ran = known.get(str(breakage), ("", []))
        tests = executing.tests(number)
        chosen = executing.within(tests, seconds)
        further = [test for test in chosen if test not in ran]
        if (breakage.path, breakage.before, breakage.after) in equivalent:
            outcome = "equivalent"
        elif not tests:
            outcome = "unreached"
        else:
            if further and not noticed:
                copy.write(breakage.path, breakage.code)
                output = into.with_suffix(".txt")
                limit_s = executing.limit_s(further)
                status = run_pytest(["-x", "--tb=line", *further], copy.folder, output, limit_s)
                copy.write(breakage.path, breakage.source)
                if status is None:
                    noticed = "it hangs"
                elif status:
                    lines = output.read_text().splitlines()
                    last = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
                    noticed = (last or lines or ["?"])[-1]
                known[str(breakage)] = noticed, ran + further
                into.write_text(json.dumps(known, indent=1))
            outcome = "killed" if noticed else "survived"
        outcomes[number] = outcome
        print(
            f"{outcome:10} {len(chosen):4} of {len(tests):4} tests  {breakage}  {noticed}",
            flush=True,
        )
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "paths",
        nargs="+",
        help="folders or modules to break, such as simulator or runtime/execution/lanes.py",
    )
    parser.add_argument("--mutants", type=int, default=60, help="breakages of each path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--at-least", type=float, default=0.0, help="exit with 1 below this share, such as 0.85"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="most time for the tests of one breakage, by their recorded durations",
    )
    parser.add_argument("--tests", nargs="+", help="test files that may notice; all by default")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import_before()
    samples = [(path, draw(path, options.mutants, options.seed)) for path in options.paths]
    drawn = [breakage for _, sample in samples for breakage in sample]
    every = [
        str(file.relative_to(ROOT))
        for name in TESTS
        for file in sorted(
            (ROOT / "tests").glob(name if name.endswith(".py") else f"{name}/**/test_*.py")
        )
    ]
    into = CACHE / f"{'-'.join(options.paths).replace('/', '.')}-{options.mutants}-{options.seed}"
    with tempfile.TemporaryDirectory() as folder:
        marked, broken = Copy(Path(folder) / "marked"), Copy(Path(folder) / "broken")
        record(drawn, marked, options.tests or every, into)
        outcomes = run(
            drawn, broken, Executing(into, drawn), options.seconds, into / "outcomes.json"
        )
    lowest = 1.0
    for path, sample in samples:
        counts = Counter(outcomes[: len(sample)])
        del outcomes[: len(sample)]
        share = counts["killed"] / max(counts["killed"] + counts["survived"], 1)
        words = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
        print(f"{path}: {words}; noticed: {share:.1%}, seed {options.seed}")
        lowest = min(lowest, share)
    return int(lowest < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
