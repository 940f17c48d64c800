"""Process supervision where right outcomes are rare: six terms, and a base with wrong steps."""
from learn.lab import doubting, lab

TASK = "learn/lab/sums.py:six"
STEPS, OUTCOME = "six terms, steps", "six terms, outcome"

FINDING = lab.Finding(
    claim="Process supervision is better than outcome supervision (figure 5 of the source), here "
          "where each step of the base is wrong in two of five cases.",
    source="2402.03300",
    checks=[lab.gap(STEPS, OUTCOME, low=0, sd=0.06)],
    arms={OUTCOME: "nano_rlvr.py", STEPS: "examples/process_rewards.py"},
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS | lab.FLAT,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"},
    flags=f"{doubting.flags('erring')} --data {TASK} --eval_data {TASK}",
    prepare=lambda: doubting.make_base("erring"),
    seeds=(3, 4, 5, 6, 7))

if __name__ == "__main__":
    lab.main(FINDING)
