"""What the steps share and what is not learning: questions, rewards, a clock, figures.

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
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import data
from rewards import gsm8k_reward

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = str(ROOT / "models/tiny")
RUNS, PAGE = ROOT / "runs/ladder", HERE / "README.md"
LAST = 5  # the table has the mean reward of so many last steps
# the flags with which the script does what step 5 does
SCRIPT = ("--steps 20 --prompts 16 --samples 8 --minibatches 4 --aggregate token "
          "--kl_coef 0.01 --lr 1e-4 --lr_end 1 --max_grad_norm 0 --eval_every 20 --eval_size 256 "
          "--save_every 0").split()


# ---------------------------------------------------------------------------------- for the steps

def questions(seed):
    """-> (tokenizer, 8192 training questions, 256 held-out ones). A question is a dict with
    question, answer and prompt_ids."""
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # all steps on one core, the script as well
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    train_set = data.load("arithmetic", "train", seed=seed)
    test_set = data.load("arithmetic", "test", size=256)  # the same for every seed
    for example in train_set + test_set:
        example["prompt_ids"] = data.encode(example, tokenizer, "chat")
    return tokenizer, train_set, test_set


def score(texts, examples):
    """The reward of each text: 1.0 if its final answer is right, else 0.0."""
    return gsm8k_reward(texts, answer=[example["answer"] for example in examples])


@contextmanager
def timed(seconds, name):
    """Adds the seconds of the block to seconds[name]."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def report(file, seed, rewards, samples, seconds, texts, test_set):
    """Prints the figures of a run and writes them to runs/ladder/.

    rewards: the mean of each step; samples: per step; seconds: of sampling and updating, without
    start and evaluation; texts: the greedy answers to the questions of test_set.
    """
    write(Path(file).stem, seed, rewards, samples, seconds, fmean(score(texts, test_set)))


def write(name, seed, rewards, samples, seconds, accuracy):
    total = sum(seconds.values())
    rate = samples * len(rewards) / total
    print(f"held-out accuracy {accuracy:.1%}, {rate:.0f} samples/s, {total:.1f} s: "
          + ", ".join(f"{name} {x:.1f} s" for name, x in seconds.items()))
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / f"{name}-{seed}.json").write_text(json.dumps(
        {"rewards": rewards, "accuracy": accuracy, "rate": rate, "total": total, **seconds}))


# ------------------------------------------------------------------------- for a file of your own

def check(name):
    """Checks what learn/ladder/<name>.py does, whatever its functions are called: the gradient of
    its loss_of(model, prompts, completions, reward), and the reward of its last run."""
    import torch
    from transformers import AutoModelForCausalLM
    tokenizer, _, test_set = questions(seed=0)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    examples = [example for example in test_set[:2] for _ in range(8)]  # two groups
    prompts = [example["prompt_ids"] for example in examples]
    torch.manual_seed(0)
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": 96}
    completions = [model.generate(torch.tensor([prompt]), **how)[0, len(prompt):].tolist()
                   for prompt in prompts]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    reward = torch.tensor(score(texts, examples))  # (16,)
    groups = reward.view(2, 8)  # (2, 8)
    z = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True, correction=0) + 1e-4)

    def gradient(loss):
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, [*model.parameters()])])

    def log_prob(prompt, completion):  # of the whole completion, one at a time: no padding
        ids = torch.tensor([prompt + completion])  # (1, P + C)
        logp = model(ids).logits[0, len(prompt) - 1:-1].log_softmax(-1)  # (C, V)
        return logp.gather(1, ids[0, len(prompt):, None]).sum()  # ()

    module = importlib.import_module(f"learn.ladder.{name}")
    yours = gradient(module.loss_of(model, prompts, completions, reward))
    found = {}
    for step, weight in (("step 1", reward), ("steps 2 to 5", z.flatten())):
        terms = [-w * log_prob(*pair) for w, *pair in zip(weight, prompts, completions)]
        found[step] = torch.cosine_similarity(yours, gradient(sum(terms)), 0).item()
        print(f"cosine of your gradient and that of {step}: {found[step]:.4f}")
    same = [step for step, cosine in found.items() if cosine > 0.999]
    print(f"the gradient is that of {same[0]}" if same else
          "the gradient is that of no step; is a sign, a mask or the place of a token wrong?")
    runs = sorted(RUNS.glob(f"{name}-*.json"))
    if not runs:
        return print(f"no run yet: python -m learn.ladder.{name}")
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
    command = [sys.executable, str(ROOT / "nano_rlvr.py"), *SCRIPT, "--seed", str(seed)]
    subprocess.run([*command, "--out", str(RUNS), "--name", name], check=True,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = read(RUNS / name)
    steps = [row for row in rows if "reward/mean" in row]
    seconds = {"sampling": sum(row["seconds/rollout"] for row in steps),
               "updating": sum(row["seconds/update"] + row["seconds/sync"] for row in steps)}
    write("6_script", seed, [row["reward/mean"] for row in steps], 16 * 8, seconds,
          rows[-1]["eval/accuracy"])


def figures():
    """{name of a step: [figures of each seed]} of what runs/ladder/ has."""
    names = [path.stem for path in sorted(HERE.glob("[0-9]_*.py"))] + ["6_script"]
    found = {name: [json.loads(path.read_text()) for path in sorted(RUNS.glob(f"{name}-*.json"))]
             for name in names}
    return {name: runs for name, runs in found.items() if runs}


def cell(values):
    """Their mean, with the lowest and the highest if there are several."""
    spread = f" ({min(values):.1%} to {max(values):.1%})" if len(values) > 1 else ""
    return f"{fmean(values):.1%}{spread}"


def write_table(results):
    """Writes the table and its conditions between the marks of README.md."""
    from bench import common
    from runtime.log import provenance
    rows = []
    for name, runs in results.items():
        reward = cell([fmean(run["rewards"][-LAST:]) for run in runs])
        rate, *seconds = (fmean(run[key] for run in runs)
                          for key in ("rate", "total", "sampling", "updating"))
        rows.append([f"`{name}`", len(runs), reward, cell([run["accuracy"] for run in runs]),
                     f"{rate:.0f}", *map("{:.1f}".format, seconds)])
    head = ["step", "seeds", f"reward of the last {LAST} batches", "held-out accuracy", "samples/s",
            "seconds", "sampling", "updating"]
    mark = "<!-- table -->"
    before, _, after = PAGE.read_text().split(mark)
    PAGE.write_text(f"{before}{mark}\n{common.table(head, rows)}\n\n"
                    f"Conditions: {common.describe([provenance()])}.\n{mark}{after}")


def draw(results):
    """The mean reward of each batch, a line per step of the ladder."""
    from runtime.report.curve import figure
    fig = figure(figsize=(7, 4))
    axis = fig.subplots()
    for name, runs in results.items():
        axis.plot([fmean(values) for values in zip(*(run["rewards"] for run in runs))], label=name)
    axis.set(xlabel="batch", ylabel="mean reward of the samples", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    fig.savefig(HERE / "rewards.png", dpi=144)


def main():
    steps = sorted(path.stem for path in HERE.glob("[0-9]_*.py"))
    commands = {step: [f"learn.ladder.{step}"] for step in steps}
    commands["6_script"] = ["learn.ladder.ladder", "script"]
    for name, command in commands.items():
        if not (RUNS / f"{name}-0.json").exists():
            subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT)
    write_table(figures())
    draw(figures())


if __name__ == "__main__":
    if sys.argv[1:2] == ["script"]:
        run_script(*map(int, sys.argv[2:]))
    elif sys.argv[1:2] == ["check"]:
        check(*sys.argv[2:])
    else:
        main()
