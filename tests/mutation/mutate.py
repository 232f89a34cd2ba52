"""Mutation testing: breaks one line at a time in a copy of the repository, and runs the tests that
execute that line.

    python tests/mutation/mutate.py record                 # which test executes which line
    python tests/mutation/mutate.py run simulator runtime  # a sample of breakages

cosmic-ray makes the breakages and coverage.py says which tests execute a line. `docs/mutation.md`
explains the output.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import coverage
from breakages import breakages, plain
from cosmic_ray.mutating import mutate_code
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome
from coverage.parser import PythonParser

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".mutation"
RECORDED = (
    "simulator",
    "runtime",
    "properties",
    "experiments/test_train.py",
    "experiments/test_resume.py",
    "experiments/test_export.py",
)


def record(files: list[str]) -> None:
    """Runs each of the test files once under coverage.py.

    Without `files`, it runs those that were not recorded yet.
    """
    CACHE.mkdir(exist_ok=True)
    every = [
        str(path.relative_to(ROOT))
        for name in RECORDED
        for path in sorted(
            (ROOT / "tests").glob(name if name.endswith(".py") else f"{name}/**/test_*.py")
        )
    ]
    for file in files or [
        file for file in every if not (CACHE / f"{file.replace('/', '.')}.xml").exists()
    ]:
        print(file, flush=True)
        base = CACHE / file.replace("/", ".")
        options = [
            "-q",
            "--cov",
            "--cov-context=test",
            "--cov-report=",
            f"--junitxml={base}.xml",
            "-o",
            "junit_family=xunit1",
        ]
        subprocess.run(
            [sys.executable, "-m", "pytest", file, *options],
            cwd=ROOT,
            env={**os.environ, "COVERAGE_FILE": f"{base}.coverage"},
            check=False,
        )


class Executing:
    """Which tests execute each line, from the recording.

    What a fixture executes counts for every test of its file.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Duration of each test that passed."""
        self.lines: dict[str, dict[int, set[str]]] = {}
        for report in sorted(CACHE.glob("*.xml")):
            passed = {
                _id(case): float(case.attrib["time"])
                for case in ElementTree.parse(report).iter("testcase")
                if {part.tag for part in case} <= {"properties"}
            }
            self.seconds |= passed
            data = coverage.CoverageData(str(report.with_suffix(".coverage")))
            data.read()
            for path in data.measured_files():
                for line, contexts in data.contexts_by_lineno(path).items():
                    tests = self.lines.setdefault(path, {}).setdefault(line, set())
                    for test, _, phase in (context.rpartition("|") for context in contexts):
                        tests.update(
                            {test} & passed.keys() if phase == "run" else passed if phase else ()
                        )
        self.width = Counter(
            test for lines in self.lines.values() for tests in lines.values() for test in tests
        )

    def tests(self, path: str, lines: set[int], *, everywhere: bool = False) -> list[str]:
        """Returns the tests that execute one of `lines`.

        The test that executes the fewest lines comes first. With `everywhere`, the lines are a
        whole module's, and the fastest test comes first.
        """
        tests = set().union(*(self.lines[path][line] for line in lines))
        return sorted(
            tests, key=lambda test: (self.seconds[test] if everywhere else self.width[test], test)
        )

    def within(self, tests: list[str], limit_s: float) -> list[str]:
        """Returns the first of `tests` that together take at most `limit_s`, and at least three."""
        ends = accumulate(self.seconds[test] for test in tests)
        return [
            test
            for count, (test, end) in enumerate(zip(tests, ends, strict=True))
            if count < 3 or end <= limit_s
        ]


def _id(case: ElementTree.Element) -> str:
    file, name = case.attrib["file"], case.attrib["name"]
    inner = (
        case.attrib["classname"].removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    )
    return "::".join(part for part in (file, inner, name) if part)


class Breakage:
    """One small change of a module.

    `before` and `after` are the changed line, stripped.
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


def sample(
    paths: list[str], count: int, seed: int, executing: Executing
) -> list[tuple[Breakage, list[str]]]:
    """Returns about `count` breakages, each with the tests that execute it.

    The lines are at equal distances through all modules. Each line gets one breakage at random.
    """
    chance = random.Random(seed)
    modules = sorted(
        {
            str(file.relative_to(ROOT))
            for path in paths
            for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).glob("**/*.py"))
        }
    )
    lines = []
    for path in modules:
        parser = PythonParser((ROOT / path).read_text())
        parser.parse_source()
        functions = [
            (
                min([node.lineno, *(name.lineno for name in node.decorator_list)]),
                node.body[0].lineno,
                node.end_lineno or 0,
            )
            for node in ast.walk(ast.parse(parser.text))
            if isinstance(node, ast.FunctionDef)
        ]
        inside = list(breakages(ROOT / path).items())
        chance.shuffle(inside)
        for line, choices in inside:
            _, body, end = max(
                (found for found in functions if found[0] <= line <= found[2]), default=(0, 0, 0)
            )
            statement = {
                other
                for other in executing.lines.get(path, {})
                if parser.first_line(other) == parser.first_line(line)
            }
            whole = {
                other for other in executing.lines.get(path, {}) if body <= other <= end or not end
            }
            if tests := executing.tests(
                path, statement if end and line >= body else whole, everywhere=not end
            ):
                lines.append((path, line, choices, tests))
    first, step = chance.random(), len(lines) / count
    chosen = [lines[int((first + index) * step)] for index in range(count)]
    broken = [
        (Breakage(path, line, *chance.choice(choices)), tests)
        for path, line, choices, tests in chosen
    ]
    return [(breakage, tests) for breakage, tests in broken if breakage.changes]


def run(paths: list[str], count: int, seed: int, at_least: float, seconds: float) -> int:
    """Prints a line for each breakage and a table of the modules.

    Returns 1 if the share of noticed breakages is below `at_least`, and 0 otherwise.
    """
    executing = Executing()
    equivalent = {
        (entry["file"], entry["before"], entry["after"])
        for entry in tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())[
            "equivalent"
        ]
    }
    outcomes: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(
            ROOT,
            copy,
            symlinks=True,
            ignore=shutil.ignore_patterns(".git", ".venv", ".mutation", ".hypothesis"),
        )
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy / "typings"), "OMP_NUM_THREADS": "1"}
        for breakage, tests in sample(paths, count, seed, executing):
            chosen = executing.within(tests, seconds)
            if (breakage.path, breakage.before, breakage.after) in equivalent:
                outcome = "equivalent"
            else:
                Path("tests.txt").write_text("\n".join(chosen))
                Path(breakage.path).write_text(breakage.code)
                result, output = run_tests(
                    f"sh -c '{sys.executable} -m pytest -q -x -p no:cacheprovider @tests.txt 2>&1'",
                    600 + 2 * seconds,
                )
                Path(breakage.path).write_text(breakage.source)
                outcome = (
                    "survived"
                    if result is TestOutcome.SURVIVED
                    else "lost"
                    if "no match in any of" in output
                    else "killed"
                )
            outcomes.setdefault(breakage.path, Counter())[outcome] += 1
            print(f"{outcome:10} {len(chosen):4} of {len(tests):4} tests  {breakage}", flush=True)
    kinds = ("killed", "survived", "equivalent", "lost")
    for path, counts in [*sorted(outcomes.items()), ("all", sum(outcomes.values(), Counter()))]:
        print(f"{path:44}" + "".join(f" {counts[kind]:4} {kind}" for kind in kinds))
    total = sum(outcomes.values(), Counter())
    noticed = total["killed"] / max(total["killed"] + total["survived"], 1)
    print(f"noticed: {noticed:.1%} of {total['killed'] + total['survived']}, seed {seed}")
    return int(noticed < at_least)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("files", nargs="*")
    running = commands.add_parser("run")
    running.add_argument(
        "paths",
        nargs="+",
        help="folders or modules to break, such as simulator or runtime/execution/lanes.py",
    )
    running.add_argument("--mutants", type=int, default=60)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument(
        "--at-least", type=float, default=0.0, help="exit with 1 below this share, such as 0.85"
    )
    running.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="most time for the tests of one breakage, by their recorded durations",
    )
    options = parser.parse_args()
    if options.command == "record":
        record(options.files)
        return 0
    return run(options.paths, options.mutants, options.seed, options.at_least, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
