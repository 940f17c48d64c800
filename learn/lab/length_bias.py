"""Length bias: does the mean over a completion's own tokens make wrong answers grow?"""
import lab

TASKS = "learn/lab/tasks.py"
WRONG = "characters of a wrong sample"


def judge(values):
    longer = lab.above(values, "1/|o|", "constant", WRONG)
    return longer and lab.near(values, "1/|o|", "constant", "mean@4", 0.05)


FINDING = lab.Finding(
    claim="The mean over a completion's own tokens (1/|o|) punishes a long wrong answer less per "
          "token, so wrong answers grow; with a constant divisor they do not, and accuracy is the "
          "same.",
    source="2503.20783",
    rule="With 1/|o|, the wrong samples of the last 10 steps are longer than with a constant; the "
         "mean@4 of the two is within 5 points (whole interval).",
    arms={"1/|o|": "nano_rlvr.py", "constant": "nano_rlvr.py --aggregate constant",
          "Dr. GRPO": "nano_rlvr.py --algo dr_grpo"},
    flags=f"--data {TASKS}:long_sums --eval_data {TASKS}:long_sums --max_tokens 160 "
          f"--rewards gsm8k:1,{TASKS}:wrong_length:0",
    measures={WRONG: (lab.late("reward/wrong_length", 10), lab.number),
              "in step 0": (lab.at("reward/wrong_length", 0), lab.number)}
             | lab.MEAN | lab.BEFORE | lab.TOKENS,
    judge=judge,
    panels={WRONG: "reward/wrong_length", "reward of the samples": "reward/gsm8k",
            "tokens of a sample": "completion/length"},
    reading="The model is right in 5 % of these sums before the runs and in 6 to 7 % after them, "
            "so it has hardly learned. Two thirds of the groups have no gradient, as their rewards "
            "are equal. Wrong answers do not grow with either divisor: with 1/|o| "
            "they are shorter than with a constant in two of three seeds, and the same in one. The "
            "rule fails, and the task is too hard to decide the claim. In exact numbers the bias "
            "is there: see `sequence` in [the audit](../../../docs/audit.md).",
    exercises=(
        "Give --max_tokens 40. Predict what happens to truncated answers with both divisors.",
        "Compute by hand the weight of a token of a wrong answer of 10 and of 100 tokens, with "
        "both divisors."))

if __name__ == "__main__":
    lab.main(FINDING)
