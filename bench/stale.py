"""How soon does each alarm notice that vLLM samples with old weights?

    python bench/stale.py            7 minutes on 2 cores; writes bench/results/stale.md and .json

Plants the fault of TRL #5312: whenever the trainer has handed over its weights, vLLM reads the
checkpoint from disk again, so that every rollout comes from the weights of step 0. The bundled
model trains with and without the fault, in fp32, at two learning rates; no alarm stops these runs.
The step of an alarm is the one whose rollouts it keeps out of the optimizer; for the reward curve,
the last step that it needs:

- checksum: runtime/sampler.py, after each sync;
- log-prob bound: mean |trainer - vLLM log-prob| of the sampled tokens above 1e-3 (the bound in
  fp32), 0.05 or 0.15 (the old and the new bound in bf16);
- reward curve: the mean reward of the last 10 steps differs from that of the healthy run by more
  than 3 standard errors, those of two independent means of 10 numbers.
"""
import contextlib
import itertools
import json
import sys
import tempfile
from statistics import fmean, variance

import common  # puts the repository on sys.path

WINDOW, BOUNDS = 10, (1e-3, 0.05, 0.15)
FLAGS = ("--steps 40 --lr_end 1 --prompts 16 --samples 8 --eval_every 1000 --eval_size 1 "
         "--mismatch_bound 1e9 --save_every 0").split()
COLUMNS = ("learning rate", "checksum", *(f"log-probs, {b:g}" for b in BOUNDS), "reward curve",
           "mismatch at step 1", "at the end", f"reward of the last {WINDOW}, healthy", "stale")


def run(folder, lr, kind):
    """One run in this process. Prints a JSON list: the steps whose sync was noticed."""
    import vllm._custom_ops
    vllm._custom_ops._supports_onednn = False  # or oneDNN would keep repacked weights only
    import nano_rlvr as nr
    from runtime.sampler import SentWeights
    check, syncs, noticed = SentWeights.check, itertools.count(), []

    def check_and_go_on(self, llm):
        if kind == "stale":
            llm.collective_rpc("reload_weights")  # without an iterator: from disk
        sync = next(syncs)
        try:
            check(self, llm)
        except RuntimeError:
            noticed.append(sync)

    SentWeights.check = check_and_go_on
    with contextlib.redirect_stdout(sys.stderr):
        nr.main([*FLAGS, "--lr", lr, "--out", folder, "--name", f"{lr}-{kind}"])
    print(json.dumps(noticed))


def first(alarms):
    """The step of the first alarm. alarms: one bool per step."""
    return next((step for step, alarm in enumerate(alarms) if alarm), "never")


def differ(a, b, step):
    """Whether the mean rewards of the last WINDOW steps are more than 3 standard errors apart."""
    if step < WINDOW - 1:
        return False
    a, b = (rewards[step + 1 - WINDOW:step + 1] for rewards in (a, b))
    return abs(fmean(a) - fmean(b)) > 3 * ((variance(a) + variance(b)) / WINDOW) ** 0.5


def cells(lr, healthy, stale):
    """A row of COLUMNS. healthy, stale: {"noticed", "mismatch", "reward"} of the two runs."""
    assert not healthy["noticed"] and max(healthy["mismatch"]) < 1e-5
    mismatch, rewards = stale["mismatch"], (healthy["reward"], stale["reward"])
    return [lr, min(stale["noticed"], default="never"),
            *(first(x > bound for x in mismatch) for bound in BOUNDS),
            first(differ(*rewards, step) for step in range(len(mismatch))),
            f"{mismatch[1]:.1e}", f"{mismatch[-1]:.1e}",
            *(f"{fmean(x[-WINDOW:]):.3f}" for x in rewards)]


def main():
    conditions, numbers = common.conditions(), {"1e-4": {}, "1e-6": {}}
    with tempfile.TemporaryDirectory() as folder:
        for lr, runs in numbers.items():
            for kind in ("healthy", "stale"):
                noticed = common.run_apart("stale.py", folder, lr, kind, OMP_NUM_THREADS="1")
                rows = [r for r in common.read(f"{folder}/{lr}-{kind}") if "reward/mean" in r]
                runs[kind] = {"noticed": noticed, "reward": [r["reward/mean"] for r in rows],
                              "mismatch": [r["mismatch/mean_abs"] for r in rows]}
    table = common.table(COLUMNS, [cells(lr, **runs) for lr, runs in numbers.items()])
    common.write("stale", f"""{table}

Step of the first alarm. vLLM has the weights of step 0 throughout: step 1 is the first with old
weights. In the healthy runs no checksum differs and the mismatch stays below 1e-5. Bundled model,
fp32. 0.05 and 0.15 are bounds for bf16, applied to the differences of this fp32 run. Flags:
`{' '.join(FLAGS)}`; {conditions}.""", {"conditions": conditions, "runs": numbers})


if __name__ == "__main__":
    run(*sys.argv[1:]) if sys.argv[1:] else main()
