"""Makes cases.json: small batches, their exact advantages, token weights, losses and gradients.

    python tests/vectors/make.py    writes cases.json, see docs/conformance.md

A naive implementation in plain Python: one loop per sum of a formula, no torch, no NumPy, nothing
imported from the trainer. Papers are named where their formula is used.

Gradients come from a complex step (Squire and Trapp 1998): f(x + ih) = f(x) + ih f'(x) up to h^2,
and with h = 1e-100 the imaginary part is exactly h f'(x). A number without imaginary part is a
constant: x.real is what autograd calls detach."""
import cmath
import json
import math
import random
import statistics
from pathlib import Path
from statistics import fmean as mean

FILE = Path(__file__).with_name("cases.json")
H = 1e-100  # the complex step
EPS = 1e-4  # added to what an advantage is divided by
MAX_LOG_RATIO = 20.0  # a log-ratio beyond it becomes a constant
DEFAULTS = dict(  # GRPO, arXiv:2402.03300, with the trainer's defaults
    baseline="group", scale="group", ratio="token", surrogate="ppo", aggregate="sequence",
    clip_low=0.2, clip_high=0.2, delta=0.0, tau=1.0, tau_neg=1.05, kl_coef=0.001, kl_in="loss",
    correction="token_truncate", correction_cap=2.0, mask_truncated=False, max_tokens=8)
PRESETS = {
    "grpo": {},
    "dr_grpo": dict(scale="none", aggregate="constant", kl_coef=0.0),  # arXiv:2503.20783
    "dapo": dict(clip_high=0.28, aggregate="token", kl_coef=0.0),  # arXiv:2503.14476
    "bnpo": dict(aggregate="token", kl_coef=0.0),
    "rloo": dict(  # arXiv:2402.14740
        baseline="leave_one_out", scale="none", ratio="product", kl_coef=0.0),
    "reinforce++": dict(baseline="batch", scale="batch", aggregate="token"),  # arXiv:2501.03262
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, kl_coef=0.0),  # arXiv:2507.18071
    "cispo": dict(  # arXiv:2506.13585
        surrogate="cispo", clip_high=4.0, aggregate="token", kl_coef=0.0),
    "sapo": dict(surrogate="sapo", kl_coef=0.0),  # arXiv:2511.20347
    "rft": dict(baseline="none", scale="none", kl_coef=0.0),  # arXiv:2308.01825
    "maxrl": dict(scale="group_mean", aggregate="constant", kl_coef=0.0),  # arXiv:2602.02710
    "kimi": dict(  # arXiv:2501.12599
        scale="none", ratio="product", surrogate="kimi", tau=0.1, kl_coef=0.0),
}


def all_in(groups):
    return [c for group in groups for c in group]


def step_rewards(c, o):
    """Rewards of a completion's steps; [] = no reward. kl_in reward subtracts the KL."""
    values = [value for _, value in c["rewards"]]
    if values and o["kl_in"] == "reward" and o["kl_coef"]:
        for policy, ref, sampled in zip(c["old"] or c["logp"], c["ref"], c["loss_mask"]):
            if sampled:
                values[-1] -= o["kl_coef"] * (policy - ref)  # k1 = log pi - log ref of a token
    return values


def minus_baseline(reward, group, batch, running, o):
    """A step's reward minus its baseline. group, batch: rewards of all steps in them."""
    if o["baseline"] == "leave_one_out":
        others = list(group)
        others.remove(reward)
        return reward - mean(others) if others else 0.0
    subtracted = {"group": mean(group), "batch": mean(batch), "running": running, "none": 0.0}
    return reward - subtracted[o["baseline"]]


def scaled(centred, group, batch, all_centred, o):
    """The advantage of a step. all_centred: of all rewards in the batch."""
    if o["scale"] == "none":
        return centred
    if o["scale"] == "group_mean":  # MaxRL
        return centred / (mean(group) + EPS) if mean(group) > 0 else 0.0
    values = {"group": group, "batch": batch, "centred": all_centred}[o["scale"]]
    return centred / (statistics.pstdev(values) + EPS)


def assign_advantages(case):
    """-> (advantages [group][completion][token], the running mean after this batch or None)."""
    o, groups, result = case["options"], case["groups"], []
    by_group = [[r for c in group for r in step_rewards(c, o)] for group in groups]
    batch = all_in(by_group)
    running = case["running_mean"]
    if running is None and batch:
        running = mean(batch)
    centred = [[minus_baseline(r, rewards, batch, running, o) for r in rewards]
               for rewards in by_group]
    for completions, rewards, left in zip(groups, by_group, centred):
        advantages = [scaled(x, rewards, batch, all_in(centred), o) for x in left]
        result.append([])
        for c in completions:  # arXiv:2402.03300, 4.1.3: sum over the steps that end here or later
            own = [advantages.pop(0) for _ in c["rewards"]]
            result[-1].append([
                math.fsum(a for (end, _), a in zip(c["rewards"], own) if sampled and t < end)
                for t, sampled in enumerate(c["loss_mask"])])
    return result, 0.9 * running + 0.1 * mean(batch) if batch else running


def assign_weights(case):
    """Weights of the tokens in the loss, [group][completion][token]; 0 where nothing is trained."""
    o = case["options"]
    judged = [c for c in all_in(case["groups"]) if c["rewards"]]

    def trained(c):  # number of tokens with a weight
        masked = o["mask_truncated"] and c["truncated"]
        return sum(c["loss_mask"]) if c["rewards"] and not masked else 0

    def weight(c):
        return {"sequence": 1 / len(judged) / trained(c),  # GRPO, eq. 3: mean of token means
                "token": 1 / sum(map(trained, judged)),  # DAPO, eq. 12: mean over all tokens
                "constant": 1 / len(judged) / o["max_tokens"]}[o["aggregate"]]  # Dr. GRPO

    return [[[weight(c) if s and trained(c) else 0.0 for s in c["loss_mask"]] for c in group]
            for group in case["groups"]]


def within(x, low, high):
    return low if x.real < low else high if x.real > high else x


def objective(log_ratio, logp, advantage, o):
    """What is maximised, of a token."""
    ratio = cmath.exp(within(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if o["surrogate"] == "ppo":  # PPO, arXiv:1707.06347
        clipped = within(ratio, 1 - o["clip_low"], 1 + o["clip_high"])
        bounded = within(ratio, 0, o["delta"] or math.inf)  # arXiv:2505.07291
        return min(bounded * advantage, clipped * advantage, key=lambda x: x.real)
    if o["surrogate"] == "cispo":  # CISPO: the bounded ratio is a constant weight
        return within(ratio, 0, 1 + o["clip_high"]).real * advantage * logp
    if o["surrogate"] == "sapo":  # SAPO
        tau = o["tau"] if advantage > 0 else o["tau_neg"]
        return 4 / tau / (1 + cmath.exp(-tau * (ratio - 1))) * advantage
    # Kimi k1.5, eq. 3, whose gradient this has
    return advantage * log_ratio - o["tau"] / 2 * log_ratio * log_ratio


def correction_of(mismatches, o):
    """Weights of the tokens of a sequence, from log pi - log pi_vllm of each."""
    ratios = [math.exp(x) for x in mismatches]
    cap = o["correction_cap"]
    if o["correction"] == "token_truncate":
        return [min(r, cap) for r in ratios]
    if o["correction"] == "token_mask":
        return [r if r <= cap else 0.0 for r in ratios]
    if o["correction"] == "sequence_mask":
        return [float(1 / cap <= math.exp(mean(mismatches)) <= cap)] * len(ratios)
    return [1.0] * len(ratios)


def sequence_loss(c, logps, advantages, weights, o):
    """A completion's part of the loss. logps: of its tokens, one of them with an imaginary part."""
    at = [t for t, s in enumerate(c["loss_mask"]) if s and weights[t]]
    if not at:
        return 0.0
    old = c["old"] or [x.real for x in logps]  # on-policy: the same numbers, as constants
    log_ratios = [logps[t] - old[t] for t in at]
    if o["ratio"] == "sequence":  # GSPO: geometric mean
        log_ratios = [sum(log_ratios) / len(at)] * len(at)
    elif o["ratio"] == "product":  # RLOO: the ratio of the whole sequence
        log_ratios = [sum(log_ratios)] * len(at)
    corrections = correction_of([old[t] - c["vllm"][t] for t in at], o)
    total = 0.0
    for t, log_ratio, correction in zip(at, log_ratios, corrections):
        loss = -objective(log_ratio, logps[t], advantages[t], o) * correction
        if o["kl_coef"] and o["kl_in"] == "loss":  # k3, http://joschu.net/blog/kl-approx.html
            d = c["ref"][t] - logps[t]
            loss += o["kl_coef"] * (cmath.exp(d) - d - 1)
        total += weights[t] * loss
    return total


def solve(case):
    """The expected results of a case."""
    o, (advantages, running_mean) = case["options"], assign_advantages(case)
    weights, loss, gradient = assign_weights(case), [], []
    for rows in zip(case["groups"], advantages, weights):
        gradient.append([])
        for c, a, w in zip(*rows):
            loss.append(sequence_loss(c, c["logp"], a, w, o).real)
            steps = [[x + 1j * H * (s == t) for s, x in enumerate(c["logp"])]
                     for t in range(len(c["logp"]))]
            gradient[-1].append([sequence_loss(c, logps, a, w, o).imag / H for logps in steps])
    return dict(advantages=advantages, weights=weights, loss=math.fsum(loss), gradient=gradient,
                running_mean=running_mean)


def make_case(name, lengths=((2, 3, 1, 4), (4, 2, 3, 2)),
              rewards=((1.0, 0.0, 0.5, 0.0), (0.0, 1.0, 1.0, 1.0)), truncated=(),
              tool=(), off=True, spread=0.5, running_mean=None, logps=None, old=None, **options):
    """A case with random log-probs that depend on its name alone.

    A part "option value" of the name, between commas, is an option too.
    rewards: per completion a number, None (no reward) or a list of (end, reward), its steps.
    truncated: (group, completion). tool: (group, completion, token): not sampled.
    off: off-policy, with log-ratios up to `spread`. logps, old: of each completion, not random."""
    o, rng = DEFAULTS | options, random.Random(name)
    for option, _, value in (part.partition(" ") for part in name.split(", ")):
        if option in DEFAULTS and value:
            o[option] = type(DEFAULTS[option])(value)

    def around(x, width, digits=2):  # rng.random() is the same in every version of Python
        return round(min(x + width * (2 * rng.random() - 1), -0.01), digits)

    groups = []
    for g, row in enumerate(lengths):
        groups.append([])
        for i, n in enumerate(row):
            shift = 2.4 * rng.random() - 1.2  # of vLLM's log-probs: both sides of sequence_mask
            logp = logps or [round(-0.3 - 2.5 * rng.random(), 2) for _ in range(n)]
            then = old or [around(x, spread, 5 if spread < 0.01 else 2) for x in logp]
            reward = rewards[g][i]
            steps = [] if reward is None else reward if isinstance(reward, list) else [(n, reward)]
            groups[-1].append(dict(
                logp=logp[:n], old=then[:n] if off else None,
                vllm=[around(x + shift, 0.6) for x in (then if off else logp)[:n]],
                ref=[around(x, 0.8) for x in logp[:n]] if o["kl_coef"] else None,
                loss_mask=[int((g, i, t) not in tool) for t in range(n)],
                truncated=int((g, i) in truncated), rewards=[list(step) for step in steps]))
    return dict(name=name, options=o, running_mean=running_mean, groups=groups)


VERDICTS = dict(  # groups with one missing, one left, all equal, none, a mean below 0
    lengths=((1, 2, 1, 2), (2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 3, 2, 1)), off=False,
    rewards=((1.0, None, 0.25, 0.0), (None, -0.5, None, None), (0.75,) * 4, (None,) * 4,
             (-1.0, 0.0, -0.5, -0.5)))
STEPS = dict(lengths=((4, 3, 5), (2, 6, 3)), rewards=(
    ([(2, 1.0), (4, 0.0)], [(1, 1.0), (2, 1.0), (3, 0.5)], [(3, 0.25)]),
    ([(2, -0.5)], [(2, 1.0), (6, 0.0)], 1.0)))
LONG = ((4, 3, 5, 2), (3, 6, 4, 5))
MISSING = ((1.0, None, 0.5, 0.0), (None,) * 4)
TOOL = dict(lengths=((4, 3, 2, 2), (5, 3, 1, 2)),
            tool={(0, 0, 1), (0, 0, 2), (1, 0, 0), (1, 0, 4), (1, 1, 1)})
PLAIN = dict(kl_coef=0.0, correction="none")
ABOVE = dict(
    PLAIN, lengths=((1, 2), (2, 1)), rewards=((1.0, 0.0),) * 2, logps=[-0.5] * 2, old=[-25.0] * 2)
BELOW = dict(ABOVE, logps=[-25.0] * 2, old=[-0.5] * 2)


def cases():
    """All cases, without their results."""
    for name, row in PRESETS.items():
        row = row | dict(spread=0.002 if name == "gspo" else 0.5)
        yield make_case(f"preset {name}, on-policy", off=False, **row)
        yield make_case(f"preset {name}, off-policy", **row)
        yield make_case(f"preset {name}, no reward, truncated, tool", **row, tool={(1, 0, 1)},
                        rewards=((1.0, None, 0.0, 0.0), (0.5, 1.0, 0.0, 1.0)), truncated={(1, 2)})
    for baseline in "group", "leave_one_out", "batch", "running", "none":
        for scale in "group", "batch", "group_mean", "none":
            yield make_case(
                f"baseline {baseline}, scale {scale}", **VERDICTS, **PLAIN, running_mean=0.25)
        yield make_case(f"baseline {baseline}, scale centred", **VERDICTS, **PLAIN,
                        running_mean=0.25, surrogate="kimi")
        yield make_case(f"baseline {baseline}, process rewards", **STEPS, **PLAIN)
    for scale in "group", "batch", "group_mean", "none":
        yield make_case(f"scale {scale}, process rewards", **STEPS, **PLAIN, off=False)
    yield make_case("scale centred, process rewards", **STEPS, **PLAIN, surrogate="kimi")
    nothing = dict(rewards=((None,) * 4,) * 2)
    for name, changes in {"first batch": {}, "no reward": nothing | dict(running_mean=0.5),
                          "first batch, no reward": nothing}.items():
        yield make_case(f"running mean, {name}", baseline="running", scale="none", off=False,
                        **PLAIN, **changes)
    for ratio in "token", "sequence", "product":
        for surrogate in "ppo", "cispo", "sapo", "kimi":
            yield make_case(f"ratio {ratio}, surrogate {surrogate}", **PLAIN)
        for kind in "none", "token_truncate", "token_mask", "sequence_mask":
            yield make_case(f"ratio {ratio}, correction {kind}", LONG, kl_coef=0.0, spread=0.05)
        yield make_case(f"ratio {ratio}, delta", LONG, **PLAIN, delta=1.3, spread=1.2)
        yield make_case(f"ratio {ratio}, tokens not sampled", **TOOL)
        yield make_case(f"ratio {ratio}, log-ratio above 20", **ABOVE)
        yield make_case(f"ratio {ratio}, log-ratio below -20", **BELOW)
    for surrogate in "cispo", "sapo", "kimi":
        yield make_case(f"surrogate {surrogate}, log-ratio above 20", **ABOVE)
    yield make_case("surrogate ppo, clip_low 0.1, clip_high 0.4", **PLAIN)
    yield make_case("surrogate sapo, tau 0.5, tau_neg 3", **PLAIN)
    yield make_case("surrogate kimi, tau 2", **PLAIN, ratio="product")
    truncated = {(0, 1), (1, 0)}
    for aggregate in "sequence", "token", "constant":
        yield make_case(f"aggregate {aggregate}, truncated", truncated=truncated)
        yield make_case(
            f"aggregate {aggregate}, mask_truncated", truncated=truncated, mask_truncated=True)
        yield make_case(f"aggregate {aggregate}, tokens not sampled", **TOOL)
        yield make_case(f"aggregate {aggregate}, no reward", rewards=MISSING, max_tokens=16)
    yield make_case("mask_truncated, all truncated", mask_truncated=True, off=False,
                    truncated={(g, i) for g in range(2) for i in range(4)})
    for kind in "token_truncate", "token_mask", "sequence_mask":
        yield make_case(f"correction {kind}, cap 1.2", correction_cap=1.2, kl_coef=0.0)
        yield make_case(f"correction {kind}, tool, KL", **TOOL, kl_coef=0.1)
    yield make_case("kl_coef 0.2", correction="none")
    yield make_case("kl_coef 0.2, on-policy", correction="none", off=False)
    for name, changes in {
            "kl_in reward": {},
            "kl_in reward, tokens not sampled": TOOL,
            "kl_in reward, leave one out": dict(baseline="leave_one_out", scale="none"),
            "kl_in reward, no reward": dict(rewards=MISSING)}.items():
        yield make_case(name, **changes, kl_coef=0.3)
    yield make_case("process rewards, one without verdict", ((4, 3, 2), (1, 2, 3)), (
        ([(1, 1.0), (3, 0.0)], None, 1.0), (None, None, [(1, 0.5), (2, 1.0)])))
    yield make_case("process rewards, two steps end in one token", ((3, 2),), (
        ([(2, 1.0), (2, 1.0), (3, 0.0)], [(1, 0.0)]),), off=False, **PLAIN)
    for name, steps in (("tokens not sampled", [(2, 1.0), (5, 0.0)]),
                        ("a step of a tool's tokens", [(2, 1.0), (4, 0.5), (5, 0.0)])):
        yield make_case(f"process rewards, {name}", ((5, 3),), ((steps, [(1, 0.0), (3, 1.0)]),),
                        tool={(0, 0, 2), (0, 0, 3)})
    yield make_case("a completion without sampled tokens", ((3, 2),), ((1.0, 0.0),),
                    tool={(0, 1, 0), (0, 1, 1)})


def text():
    """The file: a case per line, with 15 digits: the last ones depend on the C library."""
    solved = json.dumps([case | {"expected": solve(case)} for case in cases()])
    rounded = json.loads(solved, parse_float=lambda x: float(f"{float(x):.15g}"))
    lines = [json.dumps(case, separators=(",", ":")) for case in rounded]
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(text())
    print(f"wrote {FILE}")
