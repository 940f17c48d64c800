"""A real model: what a coin, and a reward for the form alone, bring of the gain."""
from learn.lab import lab

RIGHT, FAULTY = "examples/products.py:right", "learn/lab/faulty_rewards.py"


def half(arm):
    """The check that the gain of an arm is below half of the gain with right answers, which was 42
    points in earlier runs: an arm that gains nothing is 21 below, one that gains 6 is 15 below."""
    parts = [(arm, "mean@4", 1), (arm, "mean@4 before", -1),
             ("right answers", "mean@4", -0.5), ("right answers", "mean@4 before", 0.5)]
    return lab.Check(f"gain of {arm} − half the gain of right answers", parts, high=0, named=0.15,
                     sd=0.05)


FINDING = lab.Finding(
    claim="Random and format rewards bring Qwen2.5-Math-7B much of the gain of right ones (21.4 "
          "and 13.8 of 29.1 points on MATH-500), but models of other families little.",
    source="2506.10947",
    checks=[half("coin"), half("form")],
    chapter=3,
    arms={"right answers": f"nano_rlvr.py --rewards {RIGHT}",
          "coin": f"nano_rlvr.py --rewards {RIGHT}:0,random:1",
          "form": f"nano_rlvr.py --rewards {RIGHT}:0,{FAULTY}:one_equation:1"},
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"})

if __name__ == "__main__":
    lab.main(FINDING)
