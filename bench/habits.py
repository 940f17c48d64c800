"""How often is each habit of the bundled model used, and how often is it right? Before any RL.

    python -m bench.habits            half a minute on 2 cores; a table by number of terms

8 samples each of 512 held-out questions. The habits are those of models/tiny/make_tiny.py.
"""
import dataclasses
import sys
from statistics import fmean

import data
import nano_rlvr as nr
import rewards
from bench import common
from runtime import ranks
from runtime.model import load_tokenizer


def main(argv):
    cfg = nr.parse_config(argv)
    ranks.init_process_group()
    _, examples = data.load_splits(cfg, load_tokenizer(cfg))
    llm = nr.Sampler(dataclasses.replace(cfg, eval_n=8))
    prompts = [e["prompt_ids"] for e in examples]
    seeds = [data.request_seed(0, "habits", i) for i in range(len(examples))]
    rollouts = nr.rollout(llm, prompts, 8, 1.0, cfg.max_tokens, seeds)
    with rewards.Verifier("gsm8k") as verifier:
        nr.score(rollouts, examples, verifier)
    rows = []
    for terms in (3, 4, 5, 6, "all"):
        worked_out = []  # rewards
        guessed = []
        for i, r in enumerate(rollouts):
            if terms in ("all", examples[i // 8]["terms"]):
                habit = worked_out if "=" in r.text else guessed
                habit.append(r.reward)
        share = len(worked_out) / (len(worked_out) + len(guessed))
        shares = share, fmean(worked_out), fmean(guessed)
        rows.append([terms, *(f"{x:.1%}" for x in shares)])
    head = ["terms", "worked out", "right when worked out", "right when guessed"]
    print(common.table(head, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
