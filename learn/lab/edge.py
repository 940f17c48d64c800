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
    measures={"mean@4": (lab.at("eval/mean@4"), lab.share),
              "greedy": (lab.at("eval/accuracy"), lab.share),
              "groups without a gradient": (lab.late("group/flat", 30), lab.share),
              "questions": (lab.at("curriculum/questions", 0), lab.number)},
    judge=judge,
    panels={"reward of the samples": "reward/mean", "flat groups": "group/flat",
            "mean@4": "eval/mean@4"},
    reading=(
        "Easy questions teach least on average, but their three runs lie too far apart "
        "for the rule: most of their groups have no gradient. Hard ones teach as much as "
        "the middle. The bundled model knows how to work any sum out and only seldom "
        "does; a question that it fails 8 times is one that it guesses, so its first "
        "right sample is a worked one and shows the habit that pays. Hard here means out "
        "of habit, not out of reach. The bands easy and hard had fewer than 16 questions "
        "and were filled with the nearest ones."),
    exercises=(
        "Narrow the middle band to 0.45 to 0.55. Predict what happens to the share of groups "
        "without a gradient.",
        "Take `--probe 2`. Which questions are in the middle band now, and what is their true "
        "pass rate?"))

if __name__ == "__main__":
    lab.main(FINDING)
