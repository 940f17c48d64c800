"""What do per-request seeds cost vLLM on a CPU? Microseconds of processor time per sampled token.

    python bench/sampling.py                  the bundled model
    python bench/sampling.py small 128        a shape of bench/random_model.py, mean tokens

Writes bench/results/sampling.md (sampling-small.md). Three ways in turns: vLLM's sampler as
shipped, which draws noise for all requests and then again for each one with a seed; that of
runtime/sampler.py, which draws it once; and no seeds. The first two must sample the same tokens.
"""
import statistics
import sys
import tempfile
import time

import common  # puts the repository on sys.path
import nano_rlvr as nr
import random_model
import update
from runtime import dist

ROUNDS = 5  # and one to warm up


def main(argv, **changes):
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    shipped, conditions = TopKTopPSampler.forward_cpu, common.conditions()
    dist.init_process_group()
    with tempfile.TemporaryDirectory() as folder:
        if argv:
            random_model.make(folder, argv[0], int(argv[1]))
            sizes = dict(model=folder, prompts=16, samples=8, max_prompt=256, max_tokens=512)
        else:
            sizes = dict(model=common.TINY, prompts=32, samples=16, max_prompt=256, max_tokens=96)
        cfg = update.make_config(**sizes | changes)
        llm = nr.Sampler(cfg)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    sampler = runner.sampler.topk_topp_sampler
    ours, seeds = sampler.forward, range(cfg.prompts)
    ways = {"as shipped": (shipped.__get__(sampler), seeds), "noise drawn once": (ours, seeds),
            "no seeds": (shipped.__get__(sampler), None)}
    results, tokens = {way: [] for way in ways}, {}
    prompts = [[5, 6, 7, i] for i in range(cfg.prompts)]
    for _ in range(1 + ROUNDS):
        for way, (sampler.forward, seeds) in ways.items():
            start = time.process_time()
            rollouts = nr.rollout(llm, prompts, cfg.samples, 1.0, cfg.max_tokens, seeds)
            seconds = time.process_time() - start
            tokens[way] = [r.completion for r in rollouts]
            results[way].append(1e6 * seconds / sum(map(len, tokens[way])))
    sampler.forward = ours
    assert tokens["as shipped"] == tokens["noise drawn once"]
    rows = [[way, f"{statistics.median(us[1:]):.1f} ({min(us[1:]):.1f} to {max(us[1:]):.1f})"]
            for way, us in results.items()]
    text = (f"{common.table(['sampling', 'µs per token (min to max)'], rows)}\n\n"
            f"{sum(map(len, tokens['as shipped'])):,} tokens, {cfg.prompts * cfg.samples} "
            f"sequences; {conditions}")
    common.write("-".join(["sampling", *argv[:1]]), text,
                 {"conditions": conditions, "microseconds": results})


if __name__ == "__main__":
    main(sys.argv[1:])
