"""Makes fixtures/relative_bias.npz of test_relative_bias.py: layers of Hugging Face's library with random weights.

The file there: transformers 5.24.0 with torch 2.14.1 on a CPU.

    python tests/modules/make_bias_fixtures.py   # in an environment with transformers >= 5 and torch

It has the weights of each layer by their names, ``"bloom.mlp.dense_h_to_4h.weight"``, its inputs and outputs, and
gradients of tables for the sum of cubed outputs, in float32.
"""

import pathlib

import numpy as np
import torch
import transformers
from transformers.models.bloom.modeling_bloom import BloomBlock, build_alibi_tensor
from transformers.models.swin.modeling_swin import SwinLayer
from transformers.models.t5.modeling_t5 import T5Attention

FILE = pathlib.Path(__file__).parent / "fixtures" / "relative_bias.npz"
TOKENS = 24
T5 = {"vocab_size": 16, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
EAGER = {"attn_implementation": "eager"}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}


def t5_encoder():
    """A whole encoder of two layers with one table, and the table's gradient."""
    model = randomized(transformers.T5EncoderModel(transformers.T5Config(**T5, **EAGER)))
    tokens = torch.randint(16, (2, TOKENS))
    out = model(input_ids=tokens).last_hidden_state
    return model, tokens, out


def t5_decoder():
    """The causal self-attention of a decoder."""
    attention = randomized(T5Attention(transformers.T5Config(**T5, **EAGER, is_decoder=True), True, layer_idx=0))
    x = inputs(2, TOKENS, 16)
    return attention, x, attention(x, mask=causal())[0]


def bloom():
    """A block with a number of heads that is no power of two."""
    config = transformers.BloomConfig(hidden_size=24, n_head=6, hidden_dropout=0.0, attention_dropout=0.0, **EAGER)
    block, x = randomized(BloomBlock(config, layer_idx=0)), inputs(2, TOKENS, 24)
    alibi = build_alibi_tensor(torch.ones(2, TOKENS), 6, torch.float32)
    return block, x, block(x, alibi, causal())[0]


def swin():
    """A layer with shifted windows of 4 x 4 tokens on 8 x 12."""
    config = transformers.SwinConfig(window_size=4, hidden_dropout_prob=0.0, **EAGER)
    layer = randomized(SwinLayer(config, dim=16, input_resolution=(8, 12), num_heads=2, shift_size=2))
    x = inputs(2, 96, 16)
    return layer, x, layer(x, (8, 12))[0]


def inputs(*shape):
    return torch.randn(shape).bfloat16().float()


def randomized(module):
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = 1.0 if "relative" in name else parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
            values = scale * torch.randn(parameter.shape) + ("norm" in name and name.endswith("weight"))
            parameter.copy_(values.bfloat16())  # so that the file is small
    return module.eval()


def causal():
    return torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)[None, None]


def main():
    torch.manual_seed(0)
    arrays = {}
    for make in (t5_encoder, t5_decoder, bloom, swin):
        module, x, out = make()
        (out**3).sum().backward()
        arrays |= {f"{make.__name__}.{name}": parameter for name, parameter in module.named_parameters()}
        arrays |= {f"{make.__name__}.x": x, f"{make.__name__}.out": out}
        tables = {name: p for name, p in module.named_parameters() if "relative" in name}
        arrays |= {f"{make.__name__}.gradient": parameter.grad for parameter in tables.values()}
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **{name: array.detach().numpy() for name, array in arrays.items()})
    print(FILE.stat().st_size, *((name, *array.shape) for name, array in arrays.items()), sep="\n")


if __name__ == "__main__":
    main()
