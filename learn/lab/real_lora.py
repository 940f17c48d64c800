"""A real model: LoRA against full training, at equal samples."""
from learn.lab import lab

FINDING = lab.Finding(
    claim="In RL, LoRA learns as well as full training with ten times the learning rate (alpha 32, "
          "as in the source; the source also says it of rank 1).",
    source="https://thinkingmachines.ai/blog/lora/",
    checks=[lab.gap("LoRA, rank 16", "right answers", low=-0.1, high=0.1, sd=0.064)],
    chapter=3,
    arms={"right answers": "nano_rlvr.py",  # all weights, --lr 2e-5; also in real_controls
          "LoRA, rank 16": "nano_rlvr.py --lora_rank 16 --lr 2e-4"},
    flags="--rewards examples/products.py:right",
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"})

if __name__ == "__main__":
    lab.main(FINDING)
