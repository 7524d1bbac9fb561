"""The command line for presets: ``sparse-layers list``, ``show strided --seq-len 4096 --png FILE`` and ``doctor``.

``python -m sparse_layers`` does the same, and runs from a checkout, too.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import __version__
from .masks.presets import preset, preset_options, presets
from .tools.describe import describe
from .tools.pictures import draw
from .tools.subjects import LONGEST

_QUICK = 1 << 17  # tokens; planning them takes a second or two


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def _spelled(option: str, value: Any) -> str:
    """Returns the default of an option as a preset's name spells it; dots for lengths that have none."""
    if value is None and option != "offset":
        return "..."
    return "x".join(str(x).lower() for x in (value if isinstance(value, tuple) else (value,)))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
      SystemExit: with code 2 and one line on stderr if an argument is wrong; with code 1 if ``doctor`` finds wrong
        results; with code 0 after ``--help`` and ``--version``.
    """
    parser = _Parser(prog="sparse-layers", description="Sparsity patterns by name, and what runs on this machine.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{list,show,doctor}")
    commands.add_parser("list", help="the names, their options with defaults, and what they mean")
    show = commands.add_parser("show", help="picture, density, blocks, plan and expected saving of one pattern")
    show.add_argument("preset", metavar="PRESET", help="NAME or NAME:option=value,...")
    show.add_argument("--seq-len", type=int, required=True, metavar="N", help="tokens in the sequence")
    show.add_argument("--png", metavar="FILE.png", help="save the picture, too; replaces the file")
    commands.add_parser("doctor", help="versions, devices, which implementations work here, and a self-check of them")
    args = parser.parse_args(argv)

    if args.command == "list":
        for name, summary in presets().items():
            options = ",".join(f"{option}={_spelled(option, value)}" for option, value in preset_options(name).items())
            print(f"{name}{':' if options else ''}{options}\n    {summary}")
        return
    if args.command == "doctor":
        from .tools import doctor

        if code := doctor.examine():
            sys.exit(code)
        return
    try:
        mask = preset(args.preset)
        if not 1 <= args.seq_len <= LONGEST:
            raise ValueError(
                f"--seq-len must be >= 1 and at most {LONGEST}, got {args.seq_len}: to plan more may take minutes, and "
                "fewer tokens show the same pattern"
            )
        if args.png is not None and pathlib.PurePath(args.png).suffix.lower() != ".png":
            raise ValueError(f"--png must name a file that ends in .png, got {args.png!r}")
        if args.seq_len > _QUICK:
            print(f"planning for {args.seq_len} tokens, which may take half a minute", file=sys.stderr, flush=True)
        if args.png:  # first, since the name may be wrong
            draw(mask, args.seq_len, args.png)
        print(describe(args.preset, args.seq_len))
        if args.png:
            print(f"saved {args.png}")
    except (ValueError, OSError, ImportError) as error:
        show.error(str(error))


if __name__ == "__main__":
    main()
