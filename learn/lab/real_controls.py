"""A real model: what a coin, and a reward for the form alone, bring of the gain."""
from learn.lab import lab

RIGHT, FAULTY = "examples/products.py:right", "learn/lab/faulty_rewards.py"


def little(arm, share):
    """The check that an arm brings less than this share of the gain with right answers."""
    parts = [(arm, "mean@4", 1), (arm, "mean@4 before", -1),
             ("right answers", "mean@4", -share), ("right answers", "mean@4 before", share)]
    return lab.Check(f"gain of {arm} − {share} of the gain of right answers", parts, high=0,
                     sd=0.045)


FINDING = lab.Finding(
    claim="Random and format rewards bring Qwen2.5-Math-7B 74 and 47 % of the gain of right ones "
          "(21.4 and 13.8 of 29.1 points on MATH-500), but models of other families little (here: "
          "less than half of these shares).",
    source="2506.10947",
    checks=[little("coin", 0.37), little("form", 0.24)],
    chapter=3,
    arms={"right answers": f"nano_rlvr.py --rewards {RIGHT}",
          "coin": f"nano_rlvr.py --rewards {RIGHT}:0,random:1",
          "form": f"nano_rlvr.py --rewards {RIGHT}:0,{FAULTY}:one_equation:1"},
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"})

if __name__ == "__main__":
    lab.main(FINDING)
