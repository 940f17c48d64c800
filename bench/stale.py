"""How soon does each alarm notice that vLLM samples with old weights?

    python bench/stale.py            7 minutes on 2 cores; writes bench/results/stale.md and .json

Plants the fault of TRL #5312: whenever the trainer has handed over its weights, vLLM reads the checkpoint
from disk again, so that every rollout comes from the weights of step 0. The bundled model trains with and
without the fault, in fp32, at two learning rates; no alarm stops these runs. The step of an alarm is the one
whose rollouts it keeps out of the optimizer; for the reward curve, the last step that it needs:

- checksum: runtime/checksum.py, after each sync;
- log-prob bound: mean |trainer - vLLM log-prob| of the sampled tokens above 1e-3 (the bound in fp32), 0.05 or
  0.15 (the old and the new bound in bf16);
- reward curve: the mean reward of the last 10 steps differs from that of the healthy run by more than 3
  standard errors, those of two independent means of 10 numbers.
"""
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# the repository in place of this folder: both have a rewards.py
sys.path = [p for p in sys.path if Path(p).resolve() != ROOT / "bench"] + [str(ROOT)]

STEPS, WINDOW = 40, 10
LEARNING_RATES, BOUNDS = ("1e-4", "1e-6"), (1e-3, 0.05, 0.15)


def run(lr, stale, folder):
    """One run in this process. Prints a JSON list, as its last line, of the steps whose sync was noticed."""
    import vllm._custom_ops
    vllm._custom_ops._supports_onednn = False  # before LLM(): oneDNN would keep repacked linear weights only
    import nano_rlvr as nr
    from runtime.checksum import SentWeights
    make_llm, check, syncs, noticed = nr.make_llm, SentWeights.check, [], []

    def make_stale_llm(cfg):
        llm = make_llm(cfg)
        collective_rpc = llm.collective_rpc

        def reload_twice(name, kwargs):
            collective_rpc(name, kwargs=kwargs)
            collective_rpc(name)  # without an iterator: from disk
        if stale == "stale":
            llm.collective_rpc = reload_twice
        return llm

    def check_and_go_on(self, llm):
        try:
            check(self, llm)
        except RuntimeError:
            noticed.append(len(syncs))
        syncs.append(None)

    nr.make_llm, SentWeights.check = make_stale_llm, check_and_go_on
    with contextlib.redirect_stdout(sys.stderr):
        nr.main(["--lr", lr, "--lr_end", "1", "--steps", str(STEPS), "--prompts", "16", "--samples", "8",
                 "--eval_every", "1000", "--eval_size", "1", "--mismatch_bound", "1e9",
                 "--save_every", "0", "--out", folder, "--name", f"{lr}-{stale}"])
    print(json.dumps(noticed))


def first(steps):
    """The first step for which the pair (step, alarm) has an alarm, or "never"."""
    return next((step for step, alarm in steps if alarm), "never")


def curve_alarms(healthy, stale):
    """(step, whether the mean rewards of the last WINDOW steps are 3 standard errors apart) of each step."""
    for step in range(WINDOW - 1, len(healthy)):
        a, b = (rewards[step + 1 - WINDOW:step + 1] for rewards in (healthy, stale))
        error = ((statistics.variance(a) + statistics.variance(b)) / WINDOW) ** 0.5
        yield step, abs(statistics.fmean(a) - statistics.fmean(b)) > 3 * error


def report(numbers, about):
    """Writes the table and the numbers of all runs to bench/results/."""
    from bench.common import write
    columns = ["learning rate", "checksum", *(f"log-probs, {b:g}" for b in BOUNDS), "reward curve",
               "mismatch at step 1", f"at step {STEPS - 1}", f"reward of the last {WINDOW}, healthy",
               "stale"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in numbers:
        mismatch, rewards = row["mismatch"], row["reward"]
        assert not row["checksum"]["healthy"] and max(mismatch["healthy"]) < 1e-5
        cells = [row["lr"], min(row["checksum"]["stale"], default="never")]
        cells += [first(enumerate(x > bound for x in mismatch["stale"])) for bound in BOUNDS]
        cells += [first(curve_alarms(rewards["healthy"], rewards["stale"]))]
        cells += [f"{mismatch['stale'][step]:.1e}" for step in (1, -1)]
        cells += [f"{statistics.fmean(rewards[kind][-WINDOW:]):.3f}" for kind in ("healthy", "stale")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    table = "\n".join(lines)
    write("stale", f"""{table}

Step of the first alarm. vLLM has the weights of step 0 throughout: step 1 is the first with old weights. In
the healthy runs no checksum differs and the mismatch stays below 1e-5. Bundled model, fp32, {STEPS} steps of
16 prompts with 8 completions. 0.05 and 0.15 are bounds for bf16, applied to the differences of this fp32 run.
{about}; `python bench/stale.py`.""", {"conditions": about, "runs": numbers})


def main():
    from bench.common import conditions, run_apart
    about, numbers = conditions(), []
    with tempfile.TemporaryDirectory() as folder:
        for lr in LEARNING_RATES:
            row = {"lr": lr, "checksum": {}, "reward": {}, "mismatch": {}}
            for kind in ("healthy", "stale"):
                row["checksum"][kind] = run_apart(Path(__file__), lr, kind, folder, OMP_NUM_THREADS="1")
                text = (Path(folder) / f"{lr}-{kind}/metrics.jsonl").read_text()
                steps = [json.loads(line) for line in text.splitlines()][:STEPS]
                row["reward"][kind] = [step["reward/mean"] for step in steps]
                row["mismatch"][kind] = [step["mismatch/mean_abs"] for step in steps]
            numbers.append(row)
    report(numbers, about)


if __name__ == "__main__":
    run(*sys.argv[1:]) if len(sys.argv) > 1 else main()
