"""A leaky verifier: the reward rises more than the accuracy that it should stand for."""
from learn.lab import lab

FAULTY = "learn/lab/faulty_rewards.py"


def judge(values):
    return lab.gain(values, "leaky", "mean@4")[2] < 0


FINDING = lab.Finding(
    claim="RL finds what a verifier fails to check: with an imperfect verifier, models learn the "
          "shortcut and not the task; a stricter check removes it.",
    source="2604.15149",
    rule="With a verifier that accepts answers up to 5 off (most guesses of the bundled model), "
         "the true mean@4 falls. (Written after the runs. The first rule, a higher training reward "
         "and a lower mean@4 than with the exact verifier, could hardly fail.)",
    arms={"exact": "nano_rlvr.py",
          "leaky": f"nano_rlvr.py --rewards gsm8k:0,{FAULTY}:leaky:1"},
    measures=lab.MEAN | lab.BEFORE | {
        "training reward": (lab.late("reward/mean", 10), "{:.3f}".format)} | lab.TOKENS,
    judge=judge,
    panels={"true mean@4": "eval/mean@4", "training reward": "reward/mean",
            "tokens of a sample": "completion/length"},
    reading=(
        "The runs show the opposite of the claim: with the leaky verifier the true mean@4 rises "
        "by 17.5 points (12.8 to 22.2), half of what the exact one brings. The shortcut is "
        "unlearned more slowly: the greedy guesses fall from 66 to about 30 %, with the exact "
        "reward to 0. The leak is not whole: some guesses are more than 5 off, so working a sum "
        "out pays a little. The training reward, 0.96 against 0.81, hides the difference; only an "
        "exact check on held-out questions shows it."),
    exercises=(
        "Let the verifier accept answers that are at most 1 off. A guess passes in 3 of 11 "
        "cases: predict which habit wins.",
        "Add the exact reward with weight 0.5 beside the leaky one. Predict the training "
        "reward of both habits by hand, then run it."))

if __name__ == "__main__":
    lab.main(FINDING)
