"""Goes on from a prompt: ``python -m examples.train_lm.generate --out DIR --prompt "def " --tokens 200``."""

import argparse
import sys

import jax

from ..training.config import Refusal
from ..training.run import fitting, open_run
from .config import Config
from .sample import sample


def main(argv: list[str] | None = None) -> int:
    """Command line of generation. Returns the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_lm.generate", description="Sample from a trained run."
    )
    parser.add_argument("--out", default=Config.out, help=f"folder of the run [{Config.out}]")
    parser.add_argument("--prompt", help="text to go on from [that of the run]")
    parser.add_argument("--tokens", type=int, default=200, help="bytes to sample [200]")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: likeliest byte; 1: as the model is [0.8]")
    parser.add_argument("--top-p", type=float, help="sample from the likeliest bytes only that make up this share")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample [0]")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu", "tpu"), default="auto", help="where [auto]")
    args = parser.parse_args(argv)
    try:
        if not 0 <= args.seed < 2**32:
            raise Refusal(f"--seed must be in 0..2**32 - 1, got {args.seed}")
        run, state, _ = open_run(Config, args.out, args.device)
        if run.config.recalls:
            raise Refusal("--data recall: what was learnt is no text to go on with")
        prompt = run.config.prompt if args.prompt is None else args.prompt
        with fitting(run.config), jax.set_mesh(run.mesh):
            model = run.model(state)
            encoded, settings = prompt.encode("utf-8", "surrogateescape"), (args.temperature, args.top_p, args.seed)
            text = sample(model, encoded, args.tokens, *settings, is_prefix=run.config.looks_ahead)
    except Refusal as refusal:
        print(f"generate: {refusal}", file=sys.stderr)
        return 2
    print(text.decode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
