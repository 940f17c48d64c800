"""Compiles the decoder layers with torch.compile: fewer passes over memory, for a GPU.

    python -m examples.compiled --model Qwen2.5-Math-1.5B       the flags of nano_rlvr.py

Each norm, rotary embedding and SiLU * up becomes one or two passes; matrix products and attention
stay PyTorch's own. Equal layers share what is compiled, for any lengths. Not with --zero_stage 3,
which replaces the weights of a layer at each call.
"""


import torch
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

import nano_rlvr as nr
from runtime.batch import packed_attention


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
