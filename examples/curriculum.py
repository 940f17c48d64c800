"""Curriculum: train on the questions that the model sometimes gets right.

    python -m examples.curriculum --band 0.2 0.8 --steps 30        flags of nano_rlvr.py work
    python -m examples.curriculum --band 0.2 0.8 --fixed           the band of the starting model

A group whose samples are all right, or all wrong, has advantage 0. So the questions whose pass rate
is in a band are drawn (Kimi k1.5, arXiv:2501.12599, section 2.3.2). Before the first step, vLLM
samples `--probe` answers to each of the first `--pool` questions. Later, each group gives its
question a new pass rate (unless --fixed): solved ones leave the band, others enter. One process.
"""
import argparse
import json
import sys
from statistics import fmean

import nano_rlvr as nr
from runtime import ranks, records, stats
from runtime.batch import in_groups


def in_band(examples, rates, low, high, least):
    """The examples with a pass rate in [low, high]; if fewer than `least`, the nearest to it."""
    def distance(example):
        question = example["question"]
        rate = rates[question]
        return max(low - rate, rate - high, 0.0)

    nearest = sorted(examples, key=distance)  # stable: of equals, in the order of the data
    inside = sum(distance(example) == 0 for example in examples)
    return nearest[:max(least, inside)]


def train(run, low, high, pool, probe, fixed):
    """nano_rlvr's loop, on the questions of the band."""
    cfg = run.cfg
    path = run.log.folder / "pass_rates.jsonl"
    everything = run.train_set[:pool]
    prompts = [example["prompt_ids"] for example in everything]
    texts = [example["question"] for example in everything]
    questions = dict(zip(map(tuple, prompts), texts))  # prompt -> question
    rates = {}  # question -> its newest pass rate

    def write(row):
        rates.update(row["rates"])
        with path.open("a") as file:
            print(json.dumps(row), file=file)

    def add(step, groups):  # known before this step
        new = {}
        for group in groups:
            question = questions[tuple(group[0].prompt)]
            new[question] = fmean(map(stats.is_right, group))
        write({"step": step, "rates": new})

    rows = records.read(path.parent, path.name) if cfg.resume else []
    path.write_text("")
    for row in rows:
        if row["step"] <= run.checkpoints.progress.step:
            write(row)
    if not rates:
        nr.sync_weights(run.policy, run.llm)  # wakes vLLM
        run.log.say(f"pass rates of {len(everything)} questions, from {probe} samples each ...")
        seeds = []
        for i in range(len(prompts)):
            seeds.append(nr.data.request_seed(cfg.seed, "probe", i))
        samples = run.rollout(
            run.llm, prompts, probe, cfg.temperature, cfg.max_tokens, seeds,
            examples=everything, top_p=cfg.top_p)
        nr.score(samples, everything, run.verifier)
        add(0, in_groups(samples, probe))
        run.llm.sleep()

    def collect_rollouts(run, step):
        run.train_set = in_band(everything, rates, low, high, cfg.prompts)
        run.metrics["curriculum/questions"] = len(run.train_set)
        parts, sampled = nr.collect_rollouts(run, step)
        if not fixed:
            add(step + 1, sampled)
        return parts, sampled

    nr.train(run, collect_rollouts=collect_rollouts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--band", type=float, nargs=2, default=(0.2, 0.8))
    parser.add_argument("--pool", type=int, default=1024)
    parser.add_argument("--probe", type=int, default=8)
    parser.add_argument("--fixed", action="store_true")
    own, argv = parser.parse_known_args()
    if ranks.world_size() > 1:
        sys.exit("nano_rlvr: examples/curriculum.py runs in one process: leave out torchrun")
    low, high = own.band
    if not 0 <= low <= high <= 1 or min(own.pool, own.probe) < 1:
        sys.exit(f"nano_rlvr: --band {low:g} {high:g} --pool {own.pool} --probe {own.probe}: must "
                 "be two shares, the smaller one first, and numbers from 1")
    nr.main(argv, lambda run: train(run, low, high, own.pool, own.probe, own.fixed))
