"""How often is each habit of the bundled model right, and how often is it used? 8 samples of 512 held-out questions, before any RL.

    python bench/habits.py            half a minute on 2 cores; a line a number of terms
"""
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import nano_rlvr as nr  # noqa: E402
import rewards  # noqa: E402


def main():
    cfg = nr.parse_config([])
    nr.launch()
    tokenizer, _, examples = nr.prepare(cfg)
    llm = nr.make_llm(dataclasses.replace(cfg, eval_n=8))
    seeds = [nr.request_seed(0, "habits", i) for i in range(len(examples))]
    rollouts = nr.rollout(llm, [e["prompt_ids"] for e in examples], 8, 1.0, cfg.max_tokens, seeds)
    with rewards.Verifier("gsm8k") as verifier:
        nr.score(rollouts, examples, verifier)
    print("| terms | worked out | right when worked out | right when guessed |\n|---|---|---|---|")
    for terms in (3, 4, 5, 6, "all"):
        some = [r for i, r in enumerate(rollouts) if terms in ("all", examples[i // 8]["terms"])]
        work, guess = ([r.reward for r in some if ("=" in r.text) == worked] for worked in (True, False))
        print(f"| {terms} | {len(work) / len(some):.1%} | {sum(work) / len(work):.1%} | {sum(guess) / len(guess):.1%} |")


if __name__ == "__main__":
    main()
