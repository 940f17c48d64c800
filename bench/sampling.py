"""What do per-request seeds cost vLLM on a CPU? Microseconds of processor time per sampled token.

    python bench/sampling.py                  the bundled model
    python bench/sampling.py small 128        a shape of bench/random_model.py, mean tokens per completion

Writes bench/results/sampling.md and .json (sampling-small.*). Three ways in turns, in one process: vLLM's
sampler as shipped, which draws noise for all requests and then again for each one with a seed; that of
runtime/engines.py, which draws it once; and no seeds. The first two must sample the same tokens.
"""
import statistics
import sys
import tempfile
import time

import common  # puts the repository on sys.path
import nano_rlvr as nr
from bench import random_model
from runtime import dist

ROUNDS = 5  # and one to warm up


def main():
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    shipped, conditions = TopKTopPSampler.forward_cpu, common.conditions()
    dist.init_process_group()
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:]:
            random_model.make(folder, sys.argv[1], int(sys.argv[2]))
            cfg = common.make_config(folder, prompts=16, samples=8, max_prompt=256, max_tokens=512)
        else:
            cfg = common.make_config(common.ROOT / "models/tiny", prompts=32, samples=16, max_prompt=256,
                                     max_tokens=96)
        llm = nr.make_llm(cfg)
    sampler = llm.llm_engine.model_executor.driver_worker.worker.model_runner.sampler.topk_topp_sampler
    ours, seeds = sampler.forward, range(cfg.prompts)
    ways = {"as shipped": (shipped.__get__(sampler), seeds), "noise drawn once": (ours, seeds),
            "no seeds": (shipped.__get__(sampler), None)}
    results, tokens = {way: [] for way in ways}, {}
    for _ in range(1 + ROUNDS):
        for way, (sampler.forward, seeds) in ways.items():
            start = time.process_time()
            rollouts = nr.rollout(llm, [[5, 6, 7, i] for i in range(cfg.prompts)], cfg.samples, 1.0,
                                  cfg.max_tokens, seeds)
            seconds = time.process_time() - start
            tokens[way] = [r.completion for r in rollouts]
            results[way].append(1e6 * seconds / sum(map(len, tokens[way])))
    assert tokens["as shipped"] == tokens["noise drawn once"]
    lines = ["| sampling | µs per token (min to max) |", "|---|---|"]
    lines += [f"| {way} | {statistics.median(us[1:]):.1f} ({min(us[1:]):.1f} to {max(us[1:]):.1f}) |"
              for way, us in results.items()]
    lines += ["", f"{sum(map(len, tokens['as shipped'])):,} tokens, {cfg.prompts * cfg.samples} sequences; "
              f"{conditions}; `{' '.join(['python bench/sampling.py', *sys.argv[1:]])}`"]
    common.write("-".join(["sampling", *sys.argv[1:2]]), "\n".join(lines),
                 {"conditions": conditions, "microseconds": results})


if __name__ == "__main__":
    main()
