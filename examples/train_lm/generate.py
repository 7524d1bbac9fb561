"""Goes on from a prompt: ``python -m examples.train_lm.generate --out DIR --prompt "def " --tokens 200``."""

import argparse
import pathlib
import sys

from . import checkpoint, train
from .config import Config, Refusal
from .model import sample


def main(argv: list[str] | None = None) -> int:
    """Command line of generation. Returns the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_lm.generate", description="Sample from a trained run."
    )
    parser.add_argument("--out", default=Config.out, help=f"folder of the run [{Config.out}]")
    parser.add_argument("--prompt", default="def ", help="text to go on from [def ]")
    parser.add_argument("--tokens", type=int, default=200, help="bytes to sample [200]")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: likeliest byte; 1: as the model is [0.8]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample [0]")
    args = parser.parse_args(argv)
    try:
        folder = pathlib.Path(args.out) / train.CHECKPOINTS
        step, facts = checkpoint.latest(folder)
        run = train.Run(Config.load(facts["config"], {"out": args.out}))
        model = run.model(checkpoint.restore(folder, step, facts, run.init()))
        text = sample(model, run.config.seq_len, args.prompt.encode(), args.tokens, args.temperature, args.seed)
    except Refusal as refusal:
        print(f"generate: {refusal}", file=sys.stderr)
        return 2
    print(text.decode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
