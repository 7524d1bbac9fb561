"""The tests: how many seconds they take, by folder, and which take longest.

    make test
    python -m benchmarks.suite build/tests.xml

`make test` writes the file. Its seconds are of a clock on the wall, with all that fixtures took: only those of an idle
machine can be compared.
"""

import argparse
import collections
import pathlib
import xml.etree.ElementTree as ElementTree

from .record import Record, add_option


def durations(path: pathlib.Path) -> tuple[float, dict[str, list[tuple[str, float]]]]:
    """Reads a JUnit file: seconds from start to end, and of each folder its tests with their seconds."""
    root = ElementTree.parse(path).getroot()
    folders = collections.defaultdict(list)
    for case in root.iter("testcase"):
        module, seconds = case.attrib["classname"], float(case.attrib["time"])
        folders[module.rpartition(".")[0] or module].append((f"{module}::{case.attrib['name']}", seconds))
    return sum(float(suite.attrib["time"]) for suite in root.iter("testsuite")), folders


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=pathlib.Path, nargs="+", help="JUnit files, one for each run of the tests")
    parser.add_argument("--slowest", type=int, default=60, help="how many tests to name")
    add_option(parser)
    options = parser.parse_args()
    record = Record(options.record)
    record.say(record.heading)
    for path in options.files:
        wall, folders = durations(path)
        tests = [test for folder in folders.values() for test in folder]
        record.say(
            f"\n{path.name}: {len(tests)} tests in {wall:.0f} s\n\n| folder | tests | seconds |\n| --- | --- | --- |"
        )
        for name, cases in sorted(folders.items(), key=lambda item: -sum(seconds for _, seconds in item[1])):
            record.say(f"| {name} | {len(cases)} | {sum(seconds for _, seconds in cases):.0f} |")
        record.say("\n| test | seconds |\n| --- | --- |")
        slowest = sorted(tests, key=lambda test: -test[1])[: options.slowest]
        for name, seconds in slowest:
            record.say(f"| {name} | {seconds:.1f} |")
        record.add(file=path.name, seconds=wall, tests=len(tests), slowest=slowest)
    record.write()


if __name__ == "__main__":
    main()
