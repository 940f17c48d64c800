"""pass@k before and after RL: does RL solve more questions, or the same ones more surely?"""
import lab

K = 128


def judge(values):
    _, rises, _ = lab.gain(values, "RL", "pass@1")
    _, _, falls = lab.gain(values, "RL", f"pass@{K}")
    return rises > 0 and falls < 0


FINDING = lab.Finding(
    claim="RL raises pass@1, but for large k the base model solves more questions than the trained "
          "one.",
    source="2504.13837",
    rule=f"pass@1 rises, and pass@{K} falls below that of the model before RL.",
    arms={"RL": "nano_rlvr.py"},
    flags=f"--steps 50 --eval_every 50 --eval_size 64 --eval_n {K}",
    measures={title: (lab.at(f"eval/{key}", step), lab.share)
              for key, name in ((f"pass@{K}", f"pass@{K}"), ("pass@32", "pass@32"),
                                ("pass@8", "pass@8"), (f"mean@{K}", "pass@1"))
              for step, title in ((0, f"{name} before"), (-1, name))},
    judge=judge,
    panels={"pass@1": f"eval/mean@{K}", "pass@8": "eval/pass@8", f"pass@{K}": f"eval/pass@{K}"},
    reading="The curves do not cross. Before RL, every question is solved in 32 samples, so "
            "pass@128 cannot show what the model has lost. RL makes surer what it could do.",
    exercises=(
        "Add `--kl_coef 0.1` to `flags`. Predict what it does to pass@128.",
        "Train on questions that the model never solves in 128 samples "
        "(examples/curriculum.py). Does RL solve any of them?"))

if __name__ == "__main__":
    lab.main(FINDING)
