"""How often is each habit of the bundled model used, and how often is it right? Before any RL.

    python bench/habits.py            half a minute on 2 cores; a table with one line per number of terms

Measured on 8 samples each of 512 held-out questions. The habits are those of models/tiny/make_tiny.py.
"""
import dataclasses
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import data  # noqa: E402
import nano_rlvr as nr  # noqa: E402
import rewards  # noqa: E402
from runtime import dist, preflight  # noqa: E402


def main():
    cfg = nr.parse_config([])
    dist.init_process_group()
    _, examples = data.load_splits(cfg, preflight.load_tokenizer(cfg))
    llm = nr.make_llm(dataclasses.replace(cfg, eval_n=8))
    seeds = [data.request_seed(0, "habits", i) for i in range(len(examples))]
    rollouts = nr.rollout(llm, [e["prompt_ids"] for e in examples], 8, 1.0, cfg.max_tokens, seeds)
    with rewards.Verifier("gsm8k") as verifier:
        nr.score(rollouts, examples, verifier)
    print("| terms | worked out | right when worked out | right when guessed |\n|---|---|---|---|")
    for terms in (3, 4, 5, 6, "all"):
        chosen = [r for i, r in enumerate(rollouts) if terms in ("all", examples[i // 8]["terms"])]
        worked_out = [r.reward for r in chosen if "=" in r.text]
        guessed = [r.reward for r in chosen if "=" not in r.text]
        cells = len(worked_out) / len(chosen), fmean(worked_out), fmean(guessed)
        print(f"| {terms} | " + " | ".join(f"{x:.1%}" for x in cells) + " |")


if __name__ == "__main__":
    main()
