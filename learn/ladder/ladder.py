"""What the steps share and what is not learning: questions for steps 1 to 4, figures, a check.

    python -m learn.ladder.ladder      runs each step that has no figures in runs/ladder/ yet, and
                                       writes the table of README.md and rewards.png
    python -m learn.ladder.ladder check mine     checks what your learn/ladder/mine.py does
"""
import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import data

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = str(ROOT / "models/tiny")
RUNS = ROOT / "runs/ladder"
PAGE = HERE / "README.md"
SAMPLES = 128  # completions per step of every file
LAST = 5  # the table has the mean reward of so many last steps
# the flags with which the script does what step 5 does
SCRIPT = ("--steps 20 --prompts 16 --samples 8 --minibatches 4 --aggregate token "
          "--kl_coef 0.01 --lr 1e-4 --lr_end 1 --max_grad_norm 0 --eval_every 20 --eval_size 256 "
          "--save_every 0").split()


# ---------------------------------------------------------------------------------- for the steps

@dataclass
class Question:
    text: str  # 14+2-9
    answer: str  # 7
    prompt: list  # token ids of <|user|>14+2-9<|assistant|>


def load_questions(seed):
    """-> (tokenizer, 8192 questions to train on, 256 held-out questions)

    They are the script's --task arithmetic. 5_vllm.py makes the same ones in plain lines. The
    held-out questions are the same for every seed."""
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # all steps on one core, the script as well
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def with_prompts(examples):
        questions = []
        for example in examples:
            prompt = data.encode(example, tokenizer, "chat")
            questions.append(Question(example["question"], example["answer"], prompt))
        return questions

    train_set = data.load("arithmetic", "train", seed=seed)
    test_set = data.load("arithmetic", "test", size=256)
    return tokenizer, with_prompts(train_set), with_prompts(test_set)


def report(file, seed, log, accuracy):
    """Prints the figures of a run, and writes them to runs/ladder/ for the table and the picture.

    log: for each step a dict with reward (the mean), sampling and updating (seconds); accuracy: the
    share of right greedy answers to the held-out questions, after the last step."""
    figures = {
        "rewards": [row["reward"] for row in log],
        "accuracy": accuracy,
        "sampling": sum(row["sampling"] for row in log),
        "updating": sum(row["updating"] for row in log),
    }
    figures["total"] = figures["sampling"] + figures["updating"]
    figures["rate"] = SAMPLES * len(log) / figures["total"]  # completions per second
    print("held-out accuracy {accuracy:.1%}, {rate:.0f} samples/s, {total:.1f} s: "
          "sampling {sampling:.1f} s, updating {updating:.1f} s".format(**figures))
    RUNS.mkdir(parents=True, exist_ok=True)
    path = RUNS / f"{Path(file).stem}-{seed}.json"
    path.write_text(json.dumps(figures))


# ------------------------------------------------------------------------- for a file of your own

def check(name):
    """Checks what learn/ladder/<name>.py does, whatever its functions are called: the gradient of
    its loss_of(model, prompts, completions, reward), and the reward of its last run."""
    check_gradient(name)
    check_run(name)


def check_gradient(name):
    """Compares the gradient of loss_of with those of steps 1 and 2, computed without padding."""
    import torch
    from transformers import AutoModelForCausalLM
    _, _, test_set = load_questions(seed=0)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    torch.manual_seed(0)
    prompts, completions = [], []
    for question in test_set[:2]:
        prompt = torch.tensor([question.prompt])  # (1, P)
        for _ in range(8):
            ids = model.generate(prompt, do_sample=True, top_k=0, max_new_tokens=96)  # (1, P + C)
            prompts.append(question.prompt)
            completions.append(ids[0, len(question.prompt):].tolist())
    # These rewards are made up: a gradient can be compared for any rewards.
    reward = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0] + [1.0, 1, 0, 1, 1, 1, 0, 1])  # (16,)
    groups = reward.view(2, 8)  # (2, 8)
    std = groups.std(1, keepdim=True, correction=0)  # (2, 1)
    z_score = (groups - groups.mean(1, keepdim=True)) / (std + 1e-4)  # (2, 8)

    def gradient(loss):
        parts = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([part.flatten() for part in parts])  # (all weights of the model,)

    def log_prob(prompt, completion):
        """log p of a whole completion. -> ()"""
        ids = torch.tensor([prompt + completion])  # (1, P + C)
        logits = model(ids).logits[0, len(prompt) - 1:-1]  # (C, V)
        targets = ids[0, len(prompt):]  # (C,)
        return logits.log_softmax(-1).gather(1, targets[:, None]).sum()  # ()

    def loss_with(weights):
        loss = 0.0
        for weight, prompt, completion in zip(weights, prompts, completions):
            loss = loss - weight * log_prob(prompt, completion)  # ()
        return loss

    module = importlib.import_module(f"learn.ladder.{name}")
    yours = gradient(module.loss_of(model, prompts, completions, reward))
    verdict = "that of no step; is a sign, a mask or the place of a token wrong?"
    for step, weights in (("step 1", reward), ("steps 2 to 5", z_score.flatten())):
        cosine = torch.cosine_similarity(yours, gradient(loss_with(weights)), 0)  # ()
        print(f"cosine of your gradient and that of {step}: {cosine:.4f}")
        if cosine > 0.999:
            verdict = f"that of {step}"
    print(f"the gradient is {verdict}")


def check_run(name):
    """Says whether the last run of a file has learned."""
    runs = sorted(RUNS.glob(f"{name}-*.json"))
    if not runs:
        print(f"no run yet: python -m learn.ladder.{name}")
        return
    run = json.loads(runs[-1].read_text())
    last = fmean(run["rewards"][-LAST:])
    verdict = "it learns" if last > 0.7 else "it does not reach 70 %"
    print(f"reward of the last {LAST} of {len(run['rewards'])} batches {last:.1%}, "
          f"held-out accuracy {run['accuracy']:.1%}: {verdict}")


# ----------------------------------------------------------------------------------- all the steps

def run_script(seed=0):
    """The script as step 6. Its figures come from its metrics.jsonl."""
    from runtime.records import read
    name = f"6_script-{seed}"
    shutil.rmtree(RUNS / name, ignore_errors=True)  # of an earlier call
    command = [sys.executable, str(ROOT / "nano_rlvr.py"), *SCRIPT]
    command += ["--seed", str(seed), "--out", str(RUNS), "--name", name]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = read(RUNS / name)
    log = []
    for row in rows:
        if "reward/mean" in row:
            log.append({
                "reward": row["reward/mean"],
                "sampling": row["seconds/rollout"],
                "updating": row["seconds/update"] + row["seconds/sync"],
            })
    report("6_script", seed, log, accuracy=rows[-1]["eval/accuracy"])


def step_names():
    return sorted(path.stem for path in HERE.glob("[0-9]_*.py"))


def read_figures():
    """{name of a step: [figures of each seed]} of the runs that runs/ladder/ has."""
    figures = {}
    for name in [*step_names(), "6_script"]:
        for path in sorted(RUNS.glob(f"{name}-*.json")):
            run = json.loads(path.read_text())
            figures.setdefault(name, []).append(run)
    return figures


def cell(values):
    """The mean of the values, with the lowest and the highest if there are several."""
    text = f"{fmean(values):.1%}"
    if len(values) > 1:
        text += f" ({min(values):.1%} to {max(values):.1%})"
    return text


def write_table(figures):
    """Writes the table and its conditions between the marks of README.md."""
    from bench import common
    from runtime.log import provenance
    head = ["step", "seeds", f"reward of the last {LAST} batches", "held-out accuracy", "samples/s",
            "seconds", "sampling", "updating"]
    rows = []
    for name, runs in figures.items():
        row = [f"`{name}`", len(runs)]
        row.append(cell([fmean(run["rewards"][-LAST:]) for run in runs]))
        row.append(cell([run["accuracy"] for run in runs]))
        row.append(f"{fmean(run['rate'] for run in runs):.0f}")
        for key in ("total", "sampling", "updating"):
            seconds = fmean(run[key] for run in runs)
            row.append(f"{seconds:.1f}")
        rows.append(row)
    mark = "<!-- table -->"
    before, _, after = PAGE.read_text().split(mark)
    table = common.table(head, rows)
    conditions = common.describe([provenance()])
    PAGE.write_text(f"{before}{mark}\n{table}\n\nConditions: {conditions}.\n{mark}{after}")


def draw(figures):
    """Writes rewards.png: the mean reward of each batch, a line per step of the ladder."""
    from runtime.report.curve import figure
    picture = figure(figsize=(7, 4))
    axis = picture.subplots()
    for name, runs in figures.items():
        by_batch = zip(*[run["rewards"] for run in runs])
        axis.plot([fmean(rewards) for rewards in by_batch], label=name)
    axis.set(xlabel="batch", ylabel="mean reward of the samples", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    picture.savefig(HERE / "rewards.png", dpi=144)


def main():
    commands = {name: [f"learn.ladder.{name}"] for name in step_names()}
    commands["6_script"] = ["learn.ladder.ladder", "script"]
    for name, command in commands.items():
        if not (RUNS / f"{name}-0.json").exists():
            subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT)
    figures = read_figures()
    write_table(figures)
    draw(figures)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check", name]:
            check(name)
        case ["script", *seed]:
            run_script(*map(int, seed))
        case _:
            main()
