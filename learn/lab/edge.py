"""The edge of competence: which questions teach most, by the model's own pass rate before RL."""
import lab

CURRICULUM = "examples/curriculum.py --pool 384 --probe 8"


def judge(values):
    return all(lab.above(values, best, other, "mean@4")
               for best in ("middle",) for other in ("easy", "hard"))


FINDING = lab.Finding(
    claim="RL pays on questions at the edge of competence: those that are almost always or almost "
          "never solved teach little.",
    source="2512.07783",
    rule="After equal samples, mean@4 with questions of the middle band (pass rate 0.3 to 0.7) is "
         "above that with easy (0.9 to 1) and with hard ones (0 to 0.1).",
    arms={"easy": f"{CURRICULUM} --band 0.9 1 --fixed",
          "middle": f"{CURRICULUM} --band 0.3 0.7 --fixed",
          "hard": f"{CURRICULUM} --band 0 0.1 --fixed",
          "mixed": f"{CURRICULUM} --band 0 1 --fixed",
          "moving band": f"{CURRICULUM} --band 0.2 0.8"},
    measures=lab.MEAN | lab.GREEDY | lab.FLAT | {
        "questions": (lab.at("curriculum/questions", 0), lab.number)},
    judge=judge,
    panels={"reward of the samples": "reward/mean", "zero-std groups": "group/zero_std",
            "mean@4": "eval/mean@4"},
    reading=(
        "The hard band teaches as much as the middle. The easy band has the lowest mean, "
        "and most of its groups have no gradient, but its three runs lie too far apart "
        "for the rule. A likely reason, which these runs do not test: the bundled model "
        "can work out any of these sums and often guesses, so hard means here that it "
        "guesses, not that the sum is out of its reach. Fewer than 16 questions were in "
        "the bands easy and hard, so the nearest ones were added."),
    exercises=(
        "Narrow the middle band to 0.45 to 0.55. Predict what happens to the share of groups "
        "without a gradient.",
        "Take `--probe 2`. Which questions are in the middle band now, and what is their true "
        "pass rate?"))

if __name__ == "__main__":
    lab.main(FINDING)
