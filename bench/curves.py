"""Two figures of papers in miniature, on the bundled model: 3 seeds per curve.

    python -m bench.curves methods    12 runs: DeepSeekMath's figure 5 (arXiv:2402.03300): RFT,
                                      online RFT, GRPO with outcome and with process rewards
    python -m bench.curves dapo       15 runs: DAPO's ablation (arXiv:2503.14476, table 1): its four
                                      changes to GRPO, added one after the other

Write bench/results/curves.* and dapo.*: a table, the numbers, a picture. A run takes 2 minutes on
one core. An interrupted command continues. Rows of a figure differ only in what their names say.

Offline RFT trains on samples of the starting model: vLLM reads the starting checkpoint again before
it samples them. The evaluation comes after a sync, and is therefore that of the trained model.
"""
import itertools
import sys

from measure import common, seeds
from measure.common import series
from measure.seeds import at, late, number, share

SEEDS, BATCH = range(3), 16 * 16  # rollouts per draw
COMMON = "--prompts 16 --samples 16 --kl_coef 0 --eval_size 256 --eval_n 4 --save_every 0".split()
METHODS = {
    "RFT": "--algo rft --correction none --mismatch_bound 1e9",  # started by offline()
    "online RFT": "--algo rft",
    "GRPO, outcome": "",
    "GRPO, process": "--rewards gsm8k:0,steps:1",
}
# Several optimizer steps per batch, or no ratio would reach the clip. 48 tokens, or no completion
# would be truncated: a sum of six terms takes 35 to 50 tokens to work out.
ABLATION = {
    "GRPO": "--steps 20 --eval_every 5 --minibatches 4 --max_tokens 48",
    "+ clip-higher": "--clip_high 0.28",
    "+ dynamic sampling": "--drop_flat_groups --resample 3",
    "+ token-level loss": "--aggregate token",
    "+ overlong shaping": "--overlong_buffer 0.2",
}


def offline(argv):
    """nano_rlvr.py, but the training samples come from the starting model throughout."""
    import nano_rlvr as nr

    def collect_from_start(run, step):
        run.llm.collective_rpc("reload_weights")  # without an iterator: from disk
        run.llm.reset_prefix_cache()
        return nr.collect_rollouts(run, step)

    nr.main(argv, lambda run: nr.train(run, collect_rollouts=collect_from_start))


def rollouts(row):
    """Completions sampled in a step."""
    return BATCH * row["draws"] if "draws" in row else None


def methods():
    """DeepSeekMath's figure: name, {label: command}, columns, panels."""
    steps = "--steps 30 --eval_every 6".split()
    settings = {label: [*common.SCRIPT, *COMMON, *steps, *flags.split()]
                for label, flags in METHODS.items()}
    settings["RFT"][1:2] = ["-m", "bench.curves", "offline"]
    columns = {
        "greedy after": (at("eval/accuracy", -1), share),
        "mean@4 before": (at("eval/mean@4", 0), share),
        "at step 6": (at("eval/mean@4", 6), share),
        "at step 12": (at("eval/mean@4", 12), share),
        "at step 30": (at("eval/mean@4", 30), share),
        "tokens after": (at("eval/length", -1), number)}
    panels = {"mean@4 on held-out questions": "eval/mean@4",
              "greedy held-out accuracy": "eval/accuracy",
              "reward of the training samples": "reward/gsm8k"}
    return "curves", settings, columns, panels


def dapo():
    """DAPO's ablation: the same."""
    flags = itertools.accumulate(ABLATION.values(), lambda before, new: f"{before} {new}")
    settings = {label: [*common.SCRIPT, *COMMON, *f.split()] for label, f in zip(ABLATION, flags)}
    columns = {
        "greedy after": (at("eval/accuracy", -1), share),
        "mean@4 after": (at("eval/mean@4", -1), share),
        "entropy": (late("entropy", 5), "{:.3f}".format),
        "tokens": (late("completion/length", 5), number),
        "truncated": (late("completion/truncated", 5), share),
        "clipped": (late("clipped"), "{:.2%}".format),
        "rollouts": (lambda rows: sum(series(rows, rollouts).values()), "{:,.0f}".format)}
    panels = {"mean@4 on held-out questions": "eval/mean@4", "entropy": "entropy",
              "tokens per completion": "completion/length", "rollouts per step": rollouts,
              "truncated": "completion/truncated", "clipped tokens": "clipped"}
    return "dapo", settings, columns, panels


def main(name):
    name, settings, columns, panels = {"methods": methods, "dapo": dapo}[name]()
    folders = seeds.run_all(settings, SEEDS, common.ROOT / "runs" / name)
    seeds.report(folders, common.RESULTS / name, columns, panels)


if __name__ == "__main__":
    if sys.argv[1:2] == ["offline"]:
        offline(sys.argv[2:])
    elif sys.argv[1:] in (["methods"], ["dapo"]):
        main(sys.argv[1])
    else:
        sys.exit(__doc__)
