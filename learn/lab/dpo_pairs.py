"""DPO on verified pairs against GRPO, at equal samples."""
from learn.lab import lab


def judge(values):
    return (lab.above(values, "GRPO", "DPO offline", "mean@4")
            and lab.above(values, "DPO online", "DPO offline", "mean@4"))


FINDING = lab.Finding(
    claim="On tasks with a checkable result, RL is better than DPO, and DPO on fresh samples of "
          "the policy is better than DPO on a fixed set (code contests: PPO 22.4 %, DPO 0 %).",
    source="2404.10719",
    rule="After equal samples, mean@4 of GRPO and of online DPO are both above that of offline "
         "DPO.",
    arms={"GRPO": "nano_rlvr.py", "DPO online": "examples/dpo.py",
          "DPO offline": "examples/dpo.py --offline"},
    measures=lab.MEAN | lab.GREEDY | lab.TOKENS,
    judge=judge,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"},
    reading=(
        "Online DPO and GRPO: no difference is shown (GRPO -0.6 points, -5.3 to +4.2), so half of "
        "the claim is not. Offline DPO also learns to work sums out (33 "
        "tokens), but ends 20 points lower in mean@4, and its three runs lie far apart. "
        "All its pairs come from the starting model."),
    exercises=(
        "Add an arm with `examples/dpo.py --offline --beta 0.5`. Predict whether a larger "
        "beta, which holds the model nearer to its start, helps offline DPO.",
        "Online DPO uses two samples of each group and GRPO all eight. Predict `mean@4` with "
        "`--samples 2 --prompts 64` for both."))

if __name__ == "__main__":
    lab.main(FINDING)
