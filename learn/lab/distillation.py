"""A teacher: on-policy distillation, SFT on what it got right, or RL without it."""
import subprocess
import sys

import lab

TEACHER = lab.RUNS / "teacher/final"


def make_teacher():
    """The bundled model after the default run, 100 % right: 4 minutes on one core."""
    if not TEACHER.exists():
        subprocess.run([sys.executable, str(lab.ROOT / "nano_rlvr.py"), "--seed", "100", "--out",
                        str(lab.RUNS), "--name", "teacher", "--save_every", "0", "--resume"],
                       check=True)


def judge(values):
    return all(lab.above(values, "on-policy distillation", other, "mean@4")
               for other in ("RL", "SFT on the teacher's right answers"))


FINDING = lab.Finding(
    claim="On-policy distillation is better than RL, and than SFT on samples of the teacher "
          "(Qwen3-8B, AIME'24: 74.4 %; RL 67.6 %; off-policy distillation alone 55.0 %).",
    source="2505.09388",
    rule="After equal samples, mean@4 of on-policy distillation is above that of both others.",
    arms={"RL": "nano_rlvr.py",
          "on-policy distillation": f"examples/distill.py --teacher {TEACHER}",
          "SFT on the teacher's right answers": f"examples/distill.py --sft --teacher {TEACHER}"},
    flags="--steps 15 --eval_every 5",
    measures={"mean@4": (lab.at("eval/mean@4"), lab.share),
              "greedy": (lab.at("eval/accuracy"), lab.share),
              "tokens": (lab.at("eval/length"), lab.number),
              "entropy": (lab.late("entropy", 3), "{:.4f}".format)},
    judge=judge,
    panels={"mean@4": "eval/mean@4", "greedy": "eval/accuracy", "tokens": "eval/length"},
    prepare=make_teacher)

if __name__ == "__main__":
    lab.main(FINDING)
