"""A leaky verifier is gamed: the reward rises, and the accuracy that it should stand for falls."""
from learn.lab import lab

FAULTY = "learn/lab/faulty_rewards.py"


def judge(values):
    fooled = lab.above(values, "leaky", "exact", "training reward")
    return fooled and lab.above(values, "exact", "leaky", "mean@4")


FINDING = lab.Finding(
    claim="RL finds what a verifier fails to check: with an imperfect verifier, models learn the "
          "shortcut and not the task; a stricter check removes it.",
    source="2604.15149",
    rule="With a verifier that accepts answers up to 5 off (most guesses of the bundled model), "
         "the training reward ends above that with the exact one, and the true mean@4 below it.",
    arms={"exact": "nano_rlvr.py",
          "leaky": f"nano_rlvr.py --rewards gsm8k:0,{FAULTY}:leaky:1"},
    measures=lab.MEAN | lab.BEFORE | {
        "training reward": (lab.late("reward/mean", 10), "{:.3f}".format)} | lab.TOKENS,
    judge=judge,
    panels={"true mean@4": "eval/mean@4", "training reward": "reward/mean",
            "tokens of a sample": "completion/length"},
    reading=(
        "With the leaky verifier the training reward ends at 0.96, above the 0.81 of the exact "
        "one, while the true mean@4 is 18 points lower: the reward looks better and the model "
        "is worse. It still gains, because the leak is not whole. Some guesses are more than 5 "
        "off, so that working a sum out pays a little, and the greedy guesses fall from 66 to "
        "about 30 %; with the exact reward they fall to 0. Only an exact check on held-out "
        "questions shows it."),
    exercises=(
        "Let the verifier accept answers that are at most 1 off. A guess passes in 3 of 11 "
        "cases: predict which habit wins.",
        "Add the exact reward with weight 0.5 beside the leaky one. Predict the training "
        "reward of both habits by hand, then run it."))

if __name__ == "__main__":
    lab.main(FINDING)
