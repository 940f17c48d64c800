"""DAPO's ablation in miniature (arXiv:2503.14476, table 1): its changes to GRPO, one after another.

    python -m bench.curves       15 runs of 2 minutes on one core; an interrupted command continues

Bundled model, 3 seeds per row. Writes bench/results/dapo.*: a table, the numbers, a picture.
"""
import itertools

from measure import common, seeds
from measure.common import series
from measure.seeds import at, late, number, share

SEEDS, BATCH = range(3), 16 * 16  # rollouts per draw
COMMON = "--prompts 16 --samples 16 --kl_coef 0 --eval_size 256 --eval_n 4 --save_every 0".split()
# Several optimizer steps per batch, or no ratio would reach the clip. 48 tokens, or no completion
# would be truncated: a sum of six terms takes 35 to 50 tokens to work out.
ABLATION = {
    "GRPO": "--steps 20 --eval_every 5 --minibatches 4 --max_tokens 48",
    "+ clip-higher": "--clip_high 0.28",
    "+ dynamic sampling": "--drop_flat_groups --resample 3",
    "+ token-level loss": "--aggregate token",
    "+ overlong shaping": "--overlong_buffer 0.2",
}


def rollouts(row):
    """Completions sampled in a step."""
    return BATCH * row["draws"] if "draws" in row else None


COLUMNS = {
    "greedy after": (at("eval/accuracy", -1), share),
    "mean@4 after": (at("eval/mean@4", -1), share),
    "entropy": (late("entropy", 5), "{:.3f}".format),
    "tokens": (late("completion/length", 5), number),
    "truncated": (late("completion/truncated", 5), share),
    "clipped": (late("clipped"), "{:.2%}".format),
    "rollouts": (lambda rows: sum(series(rows, rollouts).values()), "{:,.0f}".format)}
PANELS = {"mean@4 on held-out questions": "eval/mean@4", "entropy": "entropy",
          "tokens per completion": "completion/length", "rollouts per step": rollouts,
          "truncated": "completion/truncated", "clipped tokens": "clipped"}

if __name__ == "__main__":
    flags = itertools.accumulate(ABLATION.values(), lambda before, new: f"{before} {new}")
    settings = {label: [*common.SCRIPT, *COMMON, *f.split()] for label, f in zip(ABLATION, flags)}
    folders = seeds.run_all(settings, SEEDS, common.ROOT / "runs/dapo")
    seeds.report(folders, common.RESULTS / "dapo", COLUMNS, PANELS)
