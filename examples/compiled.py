"""Compiles the decoder layers with torch.compile: fewer passes over memory, for a GPU.

    python examples/compiled.py --model Qwen2.5-Math-1.5B       the flags of nano_rlvr.py

Each norm, rotary embedding and SiLU * up becomes one or two passes; matrix products and attention
stay PyTorch's own. Equal layers share what is compiled, for any lengths. Not with --zero_stage 3,
which replaces the weights of a layer at each call.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from transformers import AttentionInterface  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402

import nano_rlvr as nr  # noqa: E402
from runtime.batch import packed_attention  # noqa: E402


def compile_layers(model, **options):
    """Compiles each decoder layer of a module, at its first call. options: of torch.compile."""
    # the layers are compiled up to the attention, and from there on
    AttentionInterface.register("packed", torch.compiler.disable(packed_attention))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):  # a decoder layer
            module.compile(dynamic=True, **options)


def train(run):
    compile_layers(run.policy.module)
    if isinstance(run.ref, torch.nn.Module):
        compile_layers(run.ref)
    nr.train(run)


if __name__ == "__main__":
    nr.main(train=train)
