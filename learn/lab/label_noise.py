"""Label noise: how many wrong verdicts RL tolerates."""
from learn.lab import lab

FAULTY = "learn/lab/faulty_rewards.py"


def judge(values):
    gains = {arm: lab.gain(values, arm, "mean@4") for arm in values}  # (mean, low, high)
    learns = all(gains[arm][1] > 0 for arm in ("0 %", "20 %", "40 %"))
    return learns and gains["50 %"][1] <= 0 and gains["60 %"][2] < 0


FINDING = lab.Finding(
    claim="Noise in the verdicts changes the rate of learning, not its fate, as long as the "
          "verifier is better than chance: where its hit rate minus its false-alarm rate J is "
          "positive the model learns, at J = 0 it drifts, below it unlearns.",
    source="2601.04411",
    rule="With 0, 20 and 40 % flipped verdicts (J = 1, 0.6, 0.2) mean@4 rises; with 50 % (J = 0) "
         "it does not; with 60 % (J = -0.2) it falls.",
    arms={"0 %": "nano_rlvr.py"} | {
        f"{p} %": f"nano_rlvr.py --rewards gsm8k:0,{FAULTY}:noisy_{p}:1" for p in (20, 40, 50, 60)},
    measures=lab.MEAN | lab.BEFORE | lab.GREEDY | lab.TOKENS,
    judge=judge,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"},
    reading="Accuracy after 30 steps falls with J. At 20 % of flips it is 3 points lower than "
            "without, at 40 % it is 15 points lower but still 20 above the start. At 50 % the "
            "reward says nothing and the model loses 6 points; at 60 % it learns the wrong "
            "answers, which are guesses of 8 tokens.",
    exercises=(
        "Write a reward that accepts wrong answers in 40 % of the cases and never rejects a "
        "right one. J is 0.6, as with 20 % of flips: predict whether it learns as fast.",
        "Predict what `--scale none` changes at 40 % of flips, then run it."))

if __name__ == "__main__":
    lab.main(FINDING)
