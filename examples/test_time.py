"""Test-time compute: what more tokens, or fewer, do to the accuracy of a model, without training.

    python examples/test_time.py       the bundled model, a minute on a CPU; flags of nano_rlvr.py

Prints the accuracy and the sampled tokens per question of greedy completions, of greedy completions
that are stopped after a budget of tokens and then have to answer, and of the best of n samples.
"""
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import data  # noqa: E402
import nano_rlvr as nr  # noqa: E402
from rewards import steps_reward  # noqa: E402
from runtime import dist, evaluation, flags, memory, stats, stop  # noqa: E402

OPENER = "</think><answer>"  # of the bundled model; another model may need another text
ANSWER = 16  # most tokens of an answer that is forced
BUDGETS, SAMPLES = (4, 8, 16, 24, 32), (1, 2, 4, 8)


def force_answers(llm, rollouts, budget, opener=OPENER):
    """Budget forcing (s1, arXiv:2501.19393): cuts completions after `budget` tokens, appends the
    opener and lets the model answer, greedily. Completions that ended earlier stay as they are."""
    tokenizer = llm.get_tokenizer()
    opener = tokenizer.encode(opener, add_special_tokens=False)
    cut = [r for r in rollouts if len(r.completion) > budget]
    prompts = [r.prompt + r.completion[:budget] + opener for r in cut]
    forced = {}
    for r, answer in zip(cut, nr.rollout(llm, prompts, 1, 0.0, ANSWER)):
        ids = r.completion[:budget] + opener + answer.completion
        text = tokenizer.decode(ids, skip_special_tokens=True)
        sampled = [True] * budget + [False] * len(opener) + [True] * len(answer.completion)
        logps = [0.0] * len(ids)  # not kept
        forced[id(r)] = nr.Rollout(r.prompt, ids, text, answer.truncated, logps, sampled)
    return [forced.get(id(r), r) for r in rollouts]


def best_of(group, example, selector):
    """The sample to which a reward function gives the highest value. It gets completions and the
    question and no gold answer. The mean of step rewards counts; None is no value."""
    values = selector([r.text for r in group], question=[example["question"]] * len(group))
    values = [fmean(x for _, x in v) if isinstance(v, list) else v for v in values]
    known = [i for i, value in enumerate(values) if value is not None]
    return group[max(known, key=values.__getitem__, default=0)]


def main(argv=None):
    with stop.with_one_line(ValueError, OSError, RuntimeError):
        cfg = nr.parse_config(argv)
        dist.init_process_group(cfg.timeout)
        train_set, examples = data.load_splits(cfg, flags.load_tokenizer(cfg))
        verifier = evaluation.start_verifier(cfg, train_set, examples)
        cfg, _ = memory.plan(cfg)
    llm, n = nr.Sampler(cfg), max(SAMPLES)

    def report(name, rollouts, tokens):
        right, tokens = fmean(map(stats.is_right, rollouts)), tokens / len(examples)
        print(f"{name:24s} accuracy {right:6.1%}   tokens per question {tokens:6.1f}")

    prompts = [e["prompt_ids"] for e in examples]
    greedy = nr.rollout(llm, prompts, 1, 0.0, cfg.max_tokens)
    for budget in (*BUDGETS, cfg.max_tokens):
        rollouts = force_answers(llm, greedy, budget)
        nr.score(rollouts, examples, verifier)
        report(f"greedy, budget {budget}", rollouts, sum(r.length for r in rollouts))
    seeds = [data.request_seed(cfg.seed, i) for i in range(len(examples))]
    samples = nr.rollout(llm, prompts, n, cfg.temperature, cfg.max_tokens, seeds)
    nr.score(samples, examples, verifier)
    for k in SAMPLES:
        groups = [samples[i:i + k] for i in range(0, len(samples), n)]
        best = [best_of(group, e, steps_reward) for group, e in zip(groups, examples)]
        report(f"best of {k} by `steps`", best, sum(r.length for group in groups for r in group))
    verifier.close()


if __name__ == "__main__":
    main()
