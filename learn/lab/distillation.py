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


FINDING = lab.Finding(
    claim="On-policy distillation is better than RL, and than SFT on samples of the teacher "
          "(Qwen3-8B, AIME'24: 74.4 %; RL 67.6 %; off-policy distillation alone 55.0 %).",
    source="2505.09388",
    checks=[lab.gap("on-policy distillation", "RL", low=0, named=0.068, sd=0.013),
            lab.gap("on-policy distillation", "SFT on the teacher's right answers", low=0,
                    named=0.194, sd=0.023)],
    arms={"RL": "nano_rlvr.py",
          "on-policy distillation": f"examples/distill.py --teacher {TEACHER}",
          "SFT on the teacher's right answers":
              f"examples/sft.py --demos {ANSWERS} --prompts 128 --samples 1"},
    flags="--steps 15 --eval_every 15",
    measures=lab.MEAN | lab.GREEDY | lab.TOKENS | {
        "entropy": (lab.late("entropy", 3), "{:.4f}".format)},
    panels=lab.SAMPLES | {"mean@4": "eval/mean@4"},
    prepare=make_teacher)

if __name__ == "__main__":
    lab.main(FINDING)
