"""Misuses of describe, diagnose, picture, draw, tune, load_tuned and of the command line."""

import contextlib
import io
import pathlib

from tests.misuse import Misuse

DIAGNOSED = "sl.diagnose(module.apply, variables, x)"
FILE = pathlib.Path(__file__)  # that is there, and no result of `tune`


def command(line):
    """Raises what the command line says of wrong arguments: one line, and code 2."""
    from sparse_layers.__main__ import main

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(line.split(" "))
        except SystemExit as end:
            assert end.code == 2 and errors.getvalue().count("\n") == 1
            raise ValueError(errors.getvalue()) from None


def names():
    import jax
    from flax import linen as nn
    from flax import nnx
    from matplotlib.figure import Figure

    import sparse_layers as sl

    def generate(x):
        yield x

    async def generate_async(x):
        return x

    shape = jax.ShapeDtypeStruct((2, 16), "float32")
    dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))

    def without_cudnn(q):
        return jax.nn.dot_product_attention(*[q.astype("bfloat16").reshape(1, -1, 2, 8)] * 3, implementation="cudnn")

    return {
        "closed_over": lambda x: dropout(x),
        "cudnn": without_cudnn,
        "generate_async": generate_async,
        "command": command,
        "generate": generate,
        "shape": shape,
        "shapes": jax.eval_shape(nn.Dense(3).init, jax.random.key(0), shape),
        "file": FILE,
        "sparse_fn": sl.make_attention_fn("local:local_attn_ctx=4", 16),
        "planned": sl.make_plan(sl.Causal(), 16),
        "figure": Figure(),
        "axes": Figure().subplots(),
        "two": (sl.Causal(), sl.Window(3)),
        "tune": lambda *args, **options: sl.tune(*args, **{"heads": 2, "head_size": 8, **options}),
    }


MISUSES = [
    # diagnose
    Misuse("sl.diagnose('causal', q)", TypeError, "model", "'causal'", "for a pattern write sl.describe(mask, length)"),
    Misuse("sl.diagnose(mask, q, k)", TypeError, "model", "And", "for a pattern write sl.describe(mask, length)"),
    Misuse("sl.diagnose(nnx.Linear, q)", TypeError, "model", "the class", "an instance of it is a model"),
    Misuse("sl.diagnose(nn.Dense, q)", TypeError, "model", "Dense", "sl.diagnose(module.apply, variables, x)"),
    Misuse("sl.diagnose((nn.Dense(3), {}), q)", TypeError, "model", "got tuple", DIAGNOSED),
    Misuse("sl.diagnose(nn.Dense(3), q)", TypeError, "model", "an unbound Dense", DIAGNOSED),
    Misuse("sl.diagnose(None, q)", TypeError, "model", "got None", DIAGNOSED),
    Misuse("sl.diagnose((x for x in [q]), q)", TypeError, "model", "got generator", "must be a callable of the inputs"),
    Misuse("sl.diagnose(generate, q)", TypeError, "model", "got a generator", "list(model(*x))"),
    Misuse(
        "sl.diagnose(jax.jit(jnp.sin).lower(q).compile(), q)",
        TypeError,
        "model",
        "Compiled",
        "write sl.diagnose(f, x) for jax.jit(f)",
    ),
    Misuse("sl.diagnose(nn.Dense(3).bind(shapes), q)", TypeError, "model", "jax.ShapeDtypeStruct", DIAGNOSED),
    Misuse("sl.diagnose(lambda x: x @ shape.T, q)", TypeError, "model", "jax.ShapeDtypeStruct", DIAGNOSED),
    Misuse("sl.diagnose(jnp.sin, iter([q]))", TypeError, "inputs", "list_iterator", "write next(batches)"),
    Misuse("sl.diagnose(jnp.sin)", ValueError, "inputs", "got ()", "must hold an array or a jax.ShapeDtypeStruct"),
    Misuse("sl.diagnose(jnp.sin, 3.0)", ValueError, "inputs", "(3.0,)", "must hold an array or a jax.ShapeDtypeStruct"),
    Misuse("sl.diagnose(jnp.sin, q, device='h1')", ValueError, "device", "'h1'", "must be the name of a GPU"),
    Misuse("sl.diagnose(jnp.sin, x=q)", TypeError, "diagnose", "'x'", "unknown argument"),
    Misuse(
        "sl.diagnose(jnp.sin, q, deterministic=True)",
        TypeError,
        "unknown argument",
        "'deterministic'",
        "functools.partial(model, deterministic=True)",
    ),
    Misuse("sl.diagnose(generate_async, q)", TypeError, "model", "an async function", "write a plain function"),
    Misuse(
        "sl.diagnose(closed_over, q)", TypeError, "model", "NNX module", "sl.diagnose(lambda model, x: model(x), model"
    ),
    Misuse("sl.diagnose(cudnn, q)", RuntimeError, "model", "cuDNN", "leave implementation out"),
    Misuse("sl.diagnose(jnp.sin, list(range(1000)))", ValueError, "inputs", "([0, 1, 2, 3, 4, 5, ...],)", "must hold"),
    # describe
    Misuse("sl.describe(mask)", ValueError, "q_len", "None", "must be an integer >= 1 with a mask"),
    Misuse("sl.describe(mask, 4.0)", ValueError, "q_len", "4.0", "must be an integer >= 1"),
    Misuse("sl.describe(mask, True)", ValueError, "q_len", "True", "must be an integer >= 1"),
    Misuse("sl.describe(mask, 4, 0)", ValueError, "kv_len", "got 0", "must be an integer >= 1"),
    Misuse("sl.describe(mask, 4, devices=0)", ValueError, "devices", "got 0", "must be an integer >= 1"),
    Misuse("sl.describe(mask, 10**8)", ValueError, "q_len", "100000000", "at most 1048576"),
    Misuse("sl.describe(mask, 8, 2_000_000)", ValueError, "kv_len", "2000000", "at most 1048576"),
    Misuse("sl.describe(mask, 8, size=True)", ValueError, "size", "True", "must be an integer >= 1"),
    Misuse("sl.describe(mask, 8, size=10**6)", ValueError, "size", "1000000", "at most 2048"),
    Misuse("sl.describe(mask, 8, fwd_params=64)", ValueError, "fwd_params", "64", "must be FwdParams or None"),
    Misuse("sl.describe(planned, 128)", ValueError, "q_len", "128", "must be None where a plan says it"),
    Misuse("sl.describe(planned, kv_len=8)", ValueError, "kv_len", "got 8", "must be None where a plan says it"),
    Misuse("sl.describe(sparse_fn, 16)", ValueError, "q_len", "16", "that of this AttentionFn"),
    Misuse("sl.describe(planned, bwd_params=sl.BwdParams())", ValueError, "bwd_params", "BwdParams(", "must be None"),
    Misuse("sl.describe(jnp.ones)", TypeError, "subject", "got function", "must be a mask, or a Plan, layer or model"),
    Misuse("sl.describe({'a': [mask]})", TypeError, "subject", "['a'][0] (And)", "describe(mask, q_len)"),
    Misuse("sl.describe(nn.Dense(3))", TypeError, "subject", "got Dense", "in @nn.compact exist in calls only"),
    Misuse("sl.describe([[1, 0], [1, 1]], 2)", TypeError, "mask", "got int: 1", "bool array [T, S]"),
    Misuse("sl.describe(np.ones((3, 3), bool), 4)", ValueError, "mask", "(3, 3)", "(q_len, kv_len) = (4, 4)"),
    Misuse("sl.describe(mask, 8, device=8)", ValueError, "device must be", "got 8", "the name of a GPU or its compute"),
    # picture
    Misuse("sl.picture(mask, 8, sizes=8)", TypeError, "picture: unknown argument", "'sizes'", "did you mean 'size'?"),
    Misuse("sl.picture(mask, None)", ValueError, "q_len", "None", "must be an integer >= 1"),
    Misuse("sl.picture(mask, '8')", ValueError, "q_len", "'8'", "must be an integer >= 1"),
    Misuse("sl.picture(mask, 4, -3)", ValueError, "kv_len", "-3", "must be an integer >= 1"),
    Misuse("sl.picture(mask, 4, size=100_000)", ValueError, "size", "100000", "at most 2048"),
    Misuse("sl.picture(mask, 2**31)", ValueError, "q_len", "2147483648", "at most 2147483646"),
    Misuse("sl.picture(np.ones((3, 3), bool), 8)", ValueError, "mask", "(3, 3)", "(q_len, kv_len) = (8, 8)"),
    # draw
    Misuse("sl.draw(mask)", ValueError, "q_len", "None", "must be an integer >= 1 with a mask"),
    Misuse("sl.draw(mask, file)", ValueError, "q_len", "tools.py", "must be an integer >= 1"),
    Misuse("sl.draw(mask, 8, 'a.foo')", ValueError, "path", "'a.foo'", "must end in one of .avif, .eps"),
    Misuse("sl.draw(mask, 8, 'picture')", ValueError, "path", "'picture'", ".png"),
    Misuse("sl.draw(mask, 8, '')", IsADirectoryError, "path", "''", "must be a file"),
    Misuse("sl.draw(mask, 8, file.parent)", IsADirectoryError, "path", "misuses", "must be a file"),
    Misuse("sl.draw(mask, 8, 'none/a.png')", FileNotFoundError, "path", "'none/a.png'", "a folder that is there"),
    Misuse("sl.draw(mask, 8, file / 'a.png')", FileNotFoundError, "path", "tools.py/a.png", "a folder that is there"),
    Misuse("sl.draw(mask, 8, 3)", TypeError, "path", "got 3", "must be a str or PathLike"),
    Misuse("sl.draw(mask, 8, kv_len=0)", ValueError, "kv_len", "got 0", "must be an integer >= 1"),
    Misuse("sl.draw(mask, 8, size=10**6)", ValueError, "size", "1000000", "at most 2048"),
    Misuse("sl.draw(two, 8, head=-1)", ValueError, "head", "-1", "must be an integer >= 0"),
    Misuse("sl.draw(two, 8, head=True)", ValueError, "head", "True", "must be an integer >= 0"),
    Misuse("sl.draw(mask, 8, blocks=1)", ValueError, "blocks", "got 1", "must be true or false"),
    Misuse("sl.draw(mask, 10**7, blocks=True)", ValueError, "q_len", "10000000", "at most 1048576"),
    Misuse("sl.draw(sl.Causal(), 32_000, blocks=True)", ValueError, "blocks", "keeps 31375", "at most 16384"),
    Misuse("sl.draw(mask, 8, ax=figure)", TypeError, "ax", "Figure", "must be matplotlib's Axes or None"),
    Misuse("sl.draw(mask, 8, 'a.png', ax=axes)", ValueError, "path", "'a.png'", "must be None where ax is given"),
    Misuse("sl.draw(two, 8, ax=axes)", ValueError, "ax", "got 2", "must be None for several"),
    Misuse("sl.draw([sl.Window(i) for i in range(20)], 8)", ValueError, "head", "got 20", "for more than 16 pictures"),
    Misuse("sl.draw(sparse_fn, 16)", ValueError, "q_len", "16", "that of this AttentionFn"),
    Misuse("sl.draw(mask, 8, blocs=True)", TypeError, "draw: unknown argument", "'blocs'", "did you mean 'blocks'?"),
    Misuse("sl.draw(planned, 16)", ValueError, "q_len", "16", "must be None where a plan says it"),
    Misuse("sl.draw(None)", TypeError, "subject", "NoneType", "must be a mask, or a Plan, layer or model"),
    # tune
    Misuse("tune(mask, -64)", ValueError, "q_len", "-64", "must be an integer >= 1"),
    Misuse("tune(mask, 64, heads=True)", ValueError, "heads", "True", "must be an integer >= 1"),
    Misuse("tune(mask, 64, head_size=8.0)", ValueError, "head_size", "8.0", "must be an integer >= 1"),
    Misuse("tune(mask, 64, dtype=None)", ValueError, "dtype", "None", "must be one of float32, bfloat16"),
    Misuse("tune(mask, 64, sinks=np.zeros(2))", ValueError, "sinks", "array([0., 0.])", "must be True or False"),
    Misuse("tune(mask, 64, candidates=3)", TypeError, "candidates", "got 3", "must be a sequence of FwdParams"),
    Misuse("tune(mask, 64, candidates='all')", TypeError, "candidates", "'all'", "must be a sequence of FwdParams"),
    Misuse("tune(mask, 64, candidates=sl.FwdParams())", TypeError, "candidates", "FwdParams(", "must be a sequence"),
    Misuse("tune(mask, 64, candidates=[64])", ValueError, "candidates", "got 64", "must be FwdParams or BwdParams"),
    Misuse("tune(mask, 64, repeats=0)", ValueError, "repeats", "got 0", "must be an integer >= 1"),
    Misuse("tune(mask, 64, segment_ids='a')", ValueError, "segment_ids", "<U1", "must be integers"),
    Misuse("tune(mask, 64, segment_ids=np.zeros((1, 64)))", ValueError, "segment_ids", "float64", "must be integers"),
    Misuse("tune(mask, 64, path=3)", TypeError, "path", "got 3", "must be a str or PathLike"),
    Misuse("tune(mask, 64, path=file)", FileExistsError, "path", "tools.py", "must be a new file"),
    Misuse("tune(mask, 64, path=file.parent)", FileExistsError, "path", "misuses", "must be a new file"),
    Misuse("tune(mask, 64, path='none/a')", FileNotFoundError, "path", "'none/a'", "a folder that is there"),
    Misuse("tune(mask, 64, path=file / 'a')", FileNotFoundError, "path", "tools.py/a", "a folder that is there"),
    Misuse("tune(mask, 64, implementation='xlaa')", ValueError, "implementation", "'xlaa'", "must be None or one of"),
    Misuse("tune(mask, 64, logits_soft_cap='x')", ValueError, "logits_soft_cap", "'x'", "a finite Python number"),
    Misuse("tune(planned, 16)", TypeError, "mask", "the Plan of one", "must be a mask"),
    Misuse("tune([[1]], 16)", TypeError, "mask", "got int: 1", "must be a Mask"),
    Misuse("tune(mask, 64, repeat=3)", TypeError, "tune: unknown argument", "'repeat'", "did you mean 'repeats'"),
    # load_tuned
    Misuse("sl.load_tuned(None)", TypeError, "path", "None", "must be a str or PathLike"),
    Misuse("sl.load_tuned('none.json')", FileNotFoundError, "path", "'none.json'", "must be a file that tune wrote"),
    Misuse("sl.load_tuned(file.parent)", FileNotFoundError, "path", "misuses", "must be a file that tune wrote"),
    Misuse("sl.load_tuned(file)", ValueError, "tools.py", "no JSON", "must be a file that tune wrote"),
    # the command line
    Misuse("command('show local --seq-len 1e5')", ValueError, "--seq-len", "'1e5'", "int"),
    Misuse("command('show local --seq-len -5')", ValueError, "--seq-len", "-5", "must be >= 1"),
    Misuse("command('show local --seq-len 100000000')", ValueError, "--seq-len", "100000000", "at most 1048576"),
    Misuse("command('show locl --seq-len 8')", ValueError, "name", "'locl'", "did you mean 'local'"),
    Misuse(
        "command('show local:local_attn_ctx=x --seq-len 8')", ValueError, "local_attn_ctx", "'x'", "an integer >= 1"
    ),
    Misuse("command('show local:size --seq-len 8')", ValueError, "options", "'size'", "must be option=value"),
    Misuse("command('show local --seq-len 8 --png a.foo')", ValueError, "--png", "'a.foo'", "ends in .png"),
    Misuse("command('show local --seq-len 8 --png ')", ValueError, "--png", "''", "ends in .png"),
    Misuse(
        "command('show local --seq-len 8 --png none/a.png')", ValueError, "path", "'none/a.png'", "a folder that is"
    ),
    Misuse("command('shwo')", ValueError, "{list,show,doctor}", "'shwo'", "choose from"),
    Misuse("command('list all')", ValueError, "arguments", "all", "unrecognized"),
]
