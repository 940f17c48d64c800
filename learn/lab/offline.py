"""The script with samples of the starting model at all steps: with --algo rft it is RFT.

    python -m learn.lab.offline --algo rft --steps 30      flags of nano_rlvr.py work

RFT (arXiv:2308.01825) imitates the right ones of samples that were drawn once, before training.
Here each step draws its part of these samples, with the weights of the starting model.
"""
import dataclasses
import sys
from types import SimpleNamespace

import nano_rlvr as nr
from runtime import trainer


def train(run):
    """nano_rlvr's loop. Before a step samples, vLLM gets the starting weights."""
    with_reference = dataclasses.replace(run.cfg, kl_coef=1.0, lora_rank=0)
    start = SimpleNamespace(module=nr.make_reference(with_reference))

    def collect_rollouts(run, step):
        run.llm.sleep()
        nr.load_weights(run.llm, trainer.named_weights(start))
        return nr.collect_rollouts(run, step)

    nr.train(run, collect_rollouts=collect_rollouts)


if __name__ == "__main__":
    # the samples are not the policy's: no importance weight, and a wide bound of the mismatch
    fixed = "--correction none --mismatch_bound 20".split()
    nr.main([*fixed, *sys.argv[1:]], train=train)
