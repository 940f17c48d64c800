"""QLoRA (arXiv:2305.14314): adapters are trained on a model whose weights are stored in few bits.

    python -m examples.quantised --bits nf4 --lora_rank 8 --lr 1e-3 --steps 20
    for bits in int8 int4 nf4; do python -m examples.quantised --bits $bits --steps 0; done

The frozen weights of the linear layers become codes, in blocks of 64 with one scale, the largest
absolute value. A code is the place of a level, and weight = level * scale:

    int8    255 levels from -1 to 1 at equal distances
    int4    15 levels at equal distances
    nf4     16 levels at quantiles of a normal distribution, which weights resemble; one of them 0

A forward pass computes the weights from the codes, layer by layer, and the gradient goes to the
adapters, which stay in full precision. vLLM gets rounded weights plus adapters in full size: the
policy that is trained, but memory is saved in the trainer only. --steps 0 shows what the rounding
costs; GPTQ and AWQ choose the codes by data. Not here: QLoRA's quantisation of the scales.
"""
import argparse

import torch

import nano_rlvr as nr

BLOCK = 64


def normal_levels():
    """The 16 levels of nf4: quantiles of a normal distribution, 8 above and 7 below 0, and 0."""
    end = 0.9677083  # halfway between 1 - 1/30 and 1 - 1/32, as the tails are infinite
    above = torch.linspace(end, 0.5, 9)  # (9,) its last quantile is 0
    below = torch.linspace(1 - end, 0.5, 8)[:-1]  # (7,)
    quantiles = torch.special.ndtri(torch.cat([below, above.flip(0)]))  # (16,)
    return quantiles / quantiles.max()  # (16,)


LEVELS = {
    "int8": torch.arange(-127, 128) / 127,
    "int4": torch.arange(-7, 8) / 7,
    "nf4": normal_levels(),
}


def quantise(weight, levels):
    """A weight -> (codes (N / 64, 64) or, of at most 16 levels, two per byte (N / 64, 32); scales
    (N / 64, 1)). N, the number of weights, is a multiple of 64."""
    blocks = weight.float().view(-1, BLOCK)  # (N / 64, 64)
    scales = blocks.abs().amax(1, keepdim=True)  # (N / 64, 1)
    scales = scales.clamp(min=1e-12)  # (N / 64, 1)
    middles = (levels[1:] + levels[:-1]) / 2
    middles = middles.to(blocks.device)
    codes = torch.bucketize(blocks / scales, middles).byte()  # (N / 64, 64)
    if len(levels) <= 16:
        first, second = codes.view(-1, BLOCK // 2, 2).unbind(2)  # (N / 64, 32) twice
        codes = first * 16 + second  # (N / 64, 32)
    return codes, scales


def dequantise(codes, scales, levels):
    """-> the rounded weight (N / 64, 64)."""
    if len(levels) <= 16:
        codes = torch.stack([codes // 16, codes % 16], dim=2)  # (N / 64, 32, 2)
        codes = codes.flatten(1)  # (N / 64, 64)
    return levels[codes.long()] * scales  # (N / 64, 64)


class Quantised(torch.nn.Module):
    """A frozen linear layer with codes in place of its weight."""

    def __init__(self, linear, levels):
        super().__init__()
        weight = linear.weight.detach()
        self.codes, self.scales = quantise(weight, levels)
        self.levels = levels.to(weight.device)
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.bias = linear.bias

    @property
    def weight(self):
        rounded = dequantise(self.codes, self.scales, self.levels)  # (N / 64, 64)
        whole = rounded.view(self.shape)  # (out, in)
        return whole.to(self.dtype)  # (out, in)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        """vLLM and checkpoints read a weight under its name."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


def quantise_model(model, levels):
    """Replaces the layers under the adapters. Returns (bits per weight, relative error)."""
    bits = weights = error = square = 0
    for layer in model.modules():
        if not hasattr(layer, "lora_A"):
            continue
        before = layer.base_layer.weight.detach().float()  # (out, in)
        quantised = Quantised(layer.base_layer, levels)
        layer.base_layer = quantised
        difference = quantised.weight - before  # (out, in)
        bits += 8 * quantised.codes.numel()
        bits += 32 * quantised.scales.numel()
        weights += before.numel()
        error += difference.square().sum().item()
        square += before.square().sum().item()
    return bits / weights, (error / square)**0.5


def train(run, bits):
    """nano_rlvr's loop on a quantised model."""
    size, error = quantise_model(run.policy.module.model, LEVELS[bits])
    run.log.say(f"{bits}: {size:.1f} bits per weight of the layers with adapters, relative error "
                f"{error:.2%}")
    nr.train(run)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--bits", choices=LEVELS, default="nf4")
    own, argv = parser.parse_known_args()
    fixed = "--lora_rank 8 --offload none".split()
    nr.main([*fixed, *argv], lambda run: train(run, own.bits))
