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


def in_band(examples, rates, low, high, least):
    """The examples with a pass rate in [low, high]; if fewer than `least`, the nearest to it."""
    def distance(example):
        rate = rates[example["question"]]
        return max(low - rate, rate - high, 0.0)

    nearest = sorted(examples, key=distance)  # stable: of equals, in the order of the data
    return nearest[:max(least, sum(distance(e) == 0 for e in examples))]


def train(run, low, high, pool, probe, fixed):
    """nano_rlvr's loop, on the questions of the band."""
    cfg, path = run.cfg, run.log.folder / "pass_rates.jsonl"
    everything, rates = run.train_set[:pool], {}
    questions = {tuple(e["prompt_ids"]): e["question"] for e in everything}

    def add(step, groups):  # known before this step
        new = {questions[tuple(g[0].prompt)]: fmean(map(stats.is_right, g)) for g in groups}
        rates.update(new)
        with path.open("a") as file:
            print(json.dumps({"step": step, "rates": new}), file=file)

    rows = records.read(path.parent, path.name) if cfg.resume else []
    rows = [row for row in rows if row["step"] <= run.checkpoints.progress.step]  # not later ones
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        rates |= row["rates"]
    if not rates:
        nr.sync_weights(run.policy, run.llm)  # wakes vLLM
        run.log.say(f"pass rates of {len(everything)} questions, from {probe} samples each ...")
        seeds = [nr.data.request_seed(cfg.seed, "probe", i) for i in range(len(everything))]
        prompts = [e["prompt_ids"] for e in everything]
        samples = run.sample(
            run.llm, prompts, probe, cfg.temperature, cfg.max_tokens, seeds,
            examples=everything, top_p=cfg.top_p)
        nr.score(samples, everything, run.verifier)
        add(0, [samples[i:i + probe] for i in range(0, len(samples), probe)])
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
    if not (0 <= own.band[0] <= own.band[1] <= 1 and min(own.pool, own.probe) > 0):
        sys.exit(f"nano_rlvr: --band {own.band[0]:g} {own.band[1]:g} --pool {own.pool} --probe "
                 f"{own.probe}: must be two shares, the smaller one first, and numbers from 1")
    nr.main(argv, lambda run: train(run, *own.band, own.pool, own.probe, own.fixed))
