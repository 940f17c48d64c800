"""A teacher: on-policy distillation, SFT on what it got right, or RL without it."""
import json
import sys

from learn.lab import lab  # isort: skip
import data

OUT = lab.RUNS / "distillation"
TEACHER, ANSWERS = OUT / "teacher-100/final", OUT / "answers-100/eval.jsonl"
SAMPLES = 15 * 16 * 8  # of an arm


def make_teacher():
    """The bundled model after the default run, and its answers to as many questions."""
    OUT.mkdir(parents=True, exist_ok=True)
    questions, script = OUT / "questions.jsonl", [sys.executable, "nano_rlvr.py"]
    rows = data.load("arithmetic", "train", SAMPLES, 100)
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = f"--model {TEACHER} --steps 0 --eval_data {questions} --eval_size {SAMPLES}"
    for name, flags in (("teacher", "--save_every 0"), ("answers", read)):
        lab.seeds.run_all({name: [*script, *flags.split()]}, [100], OUT)


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
          "SFT on the teacher's right answers":
              f"examples/sft.py --demos {ANSWERS} --prompts 128 --samples 1"},
    flags="--steps 15 --eval_every 15",
    measures=lab.MEAN | lab.GREEDY | lab.TOKENS | {
        "entropy": (lab.late("entropy", 3), "{:.4f}".format)},
    judge=judge,
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"},
    prepare=make_teacher,
    reading=(
        "Three seeds cannot tell the order in mean@4: on-policy distillation minus RL +2.5 points "
        "(-0.8 to +5.8), SFT minus on-policy distillation +3.9 (-1.8 to +9.6). In greedy accuracy "
        "on-policy distillation is above RL (92.7 % against 79.9 %) and SFT above both (+6.0, 2.1 "
        "to 9.9). SFT also ends with the lowest entropy. A likely reason, which these runs do not "
        "test: the teacher is this student after RL, so the student can write its answers already. "
        "learn/lab/r1.py has a student that is smaller than its teacher."),
    exercises=(
        "Take a teacher that was trained for 15 steps only. Predict which arm suffers more.",
        "Take the student as its own teacher with `--teacher_prompt`. Which text could help "
        "this model?"))

if __name__ == "__main__":
    lab.main(FINDING)
