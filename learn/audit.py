"""The exact-gradient audit: what each option does to the expected gradient, without sampling error.

    python -m learn.audit    prints all tables, and writes that of the presets into docs/audit.md

A completion has at most 3 of 4 tokens, and token 0 ends it: of the 64 strings, 40 are different.
The policy is a table of logits per prefix. All groups are enumerated, so the mean and the variance
of the gradient are sums, exact up to the rounding of float64. Advantages, token weights and loss
are those of nano_rlvr.py.
"""
import itertools
import math
import os
import random
import re
from collections import Counter
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import nano_rlvr as nr

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/audit.md"
TOKENS, END = 4, 0


# ---- the model

def completions(steps):
    """All completions of at most `steps` tokens. What follows the end does not count."""
    strings = itertools.product(range(TOKENS), repeat=steps)
    cut = {s[:s.index(END) + 1] if END in s else s for s in strings}
    return sorted(cut, key=lambda s: (len(s), s))


def is_right(completion):
    """The last token that is not the end must be 1: right ones have 2 or 3 tokens, or 1 of 1."""
    text = [token for token in completion if token != END]
    return bool(text) and text[-1] == 1


class Question:
    """All completions of one prompt, and tables of logits (prefixes, TOKENS).

    logits: of the policy that is trained. sampler: of the policy that sampled (vLLM). old: of the
    trainer when it stored log-probs; None = on-policy. ref: of the frozen model of the KL.
    """

    def __init__(self, knob=0.0, steps=3, seed=0):
        rng = random.Random(seed)
        self.completions = completions(steps)
        self.prefixes = sorted({c[:t] for c in self.completions for t in range(len(c))})
        self.lengths = torch.tensor([len(c) for c in self.completions])  # (S,)
        self.sequence_ids = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)  # (R,)
        self.at = torch.tensor(
            [(self.prefixes.index(c[:t]), c[t]) for c in self.completions for t in range(len(c))]).T
        self.rewards = [float(is_right(c)) for c in self.completions]
        self.logits = self.noise(rng, 0.7)
        self.logits[:, 1] += knob  # how often the policy writes a 1: how easy the question is
        self.logits[:, END] += 0.7  # so that lengths differ
        self.ref = self.logits + self.noise(rng, 1.2)
        self.sampler, self.old = self.logits, None

    def noise(self, rng, deviation):
        """A table of Gaussian numbers, the same on each machine."""
        return torch.tensor([[rng.gauss(0, deviation) for _ in range(TOKENS)]
                             for _ in self.prefixes], dtype=torch.float64)

    def logps(self, logits):
        """(prefixes, TOKENS) -> (R,): the log-prob of each token of all completions."""
        return logits.log_softmax(-1)[self.at[0], self.at[1]]  # (R,)

    def total(self, x):
        """(R,) -> (S,): the sum over each completion."""
        return x.new_zeros(len(self.lengths)).index_add(0, self.sequence_ids, x)  # (S,)

    def probs(self, logits):
        """(prefixes, TOKENS) -> (S,): the probability of each completion."""
        return self.total(self.logps(logits)).exp()  # (S,)

    def gradient(self, value):
        """The gradient (P,) of value(logits) at the policy's logits."""
        return torch.func.grad(value)(self.logits).flatten()  # (P,)

    # what one may want to climb, or to descend

    def correct(self, logits):
        """J: the probability of a right completion."""
        return self.probs(logits) @ torch.tensor(self.rewards, dtype=torch.float64)

    def kl(self, logits):
        """KL(pi || ref) of whole completions."""
        return self.probs(logits) @ self.total(self.logps(logits) - self.logps(self.ref))

    def other_kl(self, logits):
        """KL(ref || pi) of whole completions."""
        return self.probs(self.ref) @ self.total(self.logps(self.ref) - self.logps(logits))

    def token_kl(self, logits):
        """KL(pi || ref) of the next token, summed over the prefixes that pi visits, kept fixed."""
        p, ref = logits.log_softmax(-1), self.ref.log_softmax(-1)  # (prefixes, TOKENS)
        return self.visits() @ (p.exp() * (p - ref)).sum(-1)

    def other_token_kl(self, logits):
        """KL(ref || pi) of the next token, summed over the prefixes that pi visits, kept fixed."""
        p, ref = logits.log_softmax(-1), self.ref.log_softmax(-1)  # (prefixes, TOKENS)
        return self.visits() @ (ref.exp() * (ref - p)).sum(-1)

    def visits(self):
        """(prefixes,): how often the policy reaches each prefix."""
        probs = self.probs(self.logits)[self.sequence_ids]  # (R,)
        return probs.new_zeros(len(self.prefixes)).index_add(0, self.at[0], probs)


def with_sampler(question, deviation, seed=1):
    """The same question, sampled by an engine whose logits differ by Gaussian noise."""
    question.sampler = question.logits + question.noise(random.Random(seed), deviation)
    return question


def after_updates(question, step):
    """The same question after earlier updates on the same samples: along the gradient of J, until
    one logit has moved by `step`."""
    question.sampler = question.old = question.logits
    direction = question.gradient(question.correct).view_as(question.logits)
    question.logits = question.logits + step * direction / direction.abs().max()
    return question


# ---- the audit

def audit(cfg, questions, loss=nr.policy_loss, eps=1e-4):
    """Mean (Q, P) and variance of the gradient of one step, with a group for each of Q questions.

    Completions of one kind (same reward, and same length where a weight depends on the others'
    lengths) share advantage and weight. So the groups are enumerated by kind, and what completions
    of a kind do is averaged inside, which gives the same sums.
    """
    n, kinds, groups = cfg.samples, [], []
    tables = [tables_of(question, cfg) for question in questions]
    for question in questions:
        found = {}
        for s, reward in enumerate(question.rewards):
            length = len(question.completions[s]) if cfg.aggregate == "token" else 0
            found.setdefault((reward, length), []).append(s)
        kinds.append(list(found.items()))
        groups.append(enumerate_groups(question, found.values(), n))
    running = sum((q.probs(q.sampler) @ torch.tensor(q.rewards, dtype=torch.float64)).item()
                  for q in questions) / len(questions)  # where the moving average would settle

    @cache
    def advantages(rewards):
        rewards = torch.tensor(rewards, dtype=torch.float64)  # (P, G)
        return nr.group_advantages(rewards, cfg.baseline, cfg.scale, eps, running).tolist()

    @cache
    def moments(q, kind, *numbers):
        return kind_moments(cfg, tables[q], kinds[q][kind][1], loss, *numbers)

    mean = np.zeros((len(questions), questions[0].logits.numel()))  # (Q, P)
    square = 0.0
    for outcome in itertools.product(*groups):
        rewards = [[kinds[q][k][0][0] for k in group] for q, (group, _) in enumerate(outcome)]
        kept = [q for q, row in enumerate(rewards)
                if not (cfg.filter_groups and len(set(row)) == 1)]
        if not kept:
            continue  # no update
        sizes = [kinds[q][k][0][1] for q in kept for k in outcome[q][0]]
        rows = advantages(tuple(tuple(rewards[q]) for q in kept))
        step, spread = np.zeros_like(mean), 0.0
        for q, row in zip(kept, rows):
            for (k, advantage), count in Counter(zip(outcome[q][0], row)).items():
                own, own_square = moments(q, k, advantage, len(sizes), sum(sizes))
                step[q] += count * own
                spread += count * (own_square - own @ own)
        probability = math.prod(p for _, p in outcome)
        mean += probability * step
        square += probability * ((step**2).sum() + spread)
    return SimpleNamespace(mean=torch.from_numpy(mean), variance=square - (mean**2).sum())


def enumerate_groups(question, kinds, n):
    """All groups of n as (kinds of the members, probability), without regard to their order."""
    probs = question.probs(question.sampler)  # (S,)
    share = [probs[members].sum().item() for members in kinds]
    groups = []
    for group in itertools.combinations_with_replacement(range(len(share)), n):
        orders = math.factorial(n)
        for count in Counter(group).values():
            orders //= math.factorial(count)
        groups.append((group, orders * math.prod(share[k] for k in group)))
    return groups


def tables_of(question, cfg):
    """What kind_moments looks up: log-probs (R,), their gradients (R, P), probabilities (S,)."""
    return SimpleNamespace(
        logp=question.logps(question.logits), vllm=question.logps(question.sampler),
        old=None if question.old is None else question.logps(question.old),
        ref=question.logps(question.ref) if cfg.kl_coef else None,
        scores=torch.func.jacrev(question.logps)(question.logits).flatten(1),
        probs=question.probs(question.sampler), lengths=question.lengths,
        sequence_ids=question.sequence_ids)


def kind_moments(cfg, tables, members, loss, advantage, sequences, tokens):
    """Mean (P,) and mean square of the gradient of one completion of a kind, given its advantage.

    The loss is nano_rlvr's. It is differentiated by the log-probs of the tokens, and these by the
    logits.
    """
    rows = torch.isin(tables.sequence_ids, torch.tensor(members))  # (R,) tokens of these
    lengths = tables.lengths[members]  # (B,)
    weights = nr.token_weights(lengths.tolist(), cfg.aggregate, cfg.max_tokens, sequences, tokens)
    owner = torch.arange(len(members)).repeat_interleave(lengths)  # (r,)
    batch = SimpleNamespace(
        sequence_ids=owner, lengths=lengths, vllm_logps=tables.vllm[rows],
        advantage=torch.full((len(owner),), advantage, dtype=torch.float64),
        weight=torch.tensor(weights, dtype=torch.float64)[owner])
    logp = tables.logp[rows].requires_grad_()  # (r,)
    old, ref = (None if x is None else x[rows] for x in (tables.old, tables.ref))  # (r,), (r,)
    [slope] = torch.autograd.grad(-loss(logp, old, ref, batch, cfg)[0], logp)  # (r,)
    gradients = tables.scores.new_zeros(len(members), tables.scores.shape[1])  # (B, P)
    gradients.index_add_(0, owner, slope[:, None] * tables.scores[rows])
    share = tables.probs[members] / tables.probs[members].sum()  # (B,)
    return (share @ gradients).numpy(), (share @ gradients.square().sum(1)).item()


# ---- estimators of the KL that the script does not have

def from_here(x, batch):
    """(r,) -> (r,): the sum over this token and the later ones of its completion."""
    parts = x.split(batch.lengths.tolist())
    return torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])  # (r,)


# per token, from (logp, old, ref, batch). k1, k2, k3: joschu.net/blog/kl-approx.html
KL_LOSSES = {
    "k1": lambda logp, old, ref, batch: logp - ref,
    "k2": lambda logp, old, ref, batch: (logp - ref)**2 / 2,
    "k3 (the script)": lambda logp, old, ref, batch: nr.k3(logp, ref),
    # TRL's use_bias_correction_kl
    "k3 times pi/old": lambda logp, old, ref, batch: (logp - old).exp() * nr.k3(logp, ref),
    # arXiv:2506.09477: a token answers for the log-ratios of all later tokens as well
    "unbiased: k1 of all later tokens, times log pi": lambda logp, old, ref, batch:
        from_here((logp - ref).detach(), batch) * logp,
}


def kl_loss(kind, logp, old, ref, batch, cfg):
    """In place of nano_rlvr.policy_loss: the KL alone."""
    old = logp.detach() if old is None else old
    return (batch.weight * KL_LOSSES[kind](logp, old, ref, batch)).sum(), {}


def in_reward(question, kind):
    """The same question with minus the KL of the completion, by this estimator, as reward."""
    logp, ref = question.logps(question.sampler), question.logps(question.ref)  # (R,), (R,)
    question.rewards = (-question.total(KL_LOSSES[kind](logp, logp, ref, None))).tolist()
    return question


# ---- the tables

EASY, MIDDLE, HARD = 4.0, 2.0, -0.5  # knobs
DRIFT = 0.4  # the largest change of a logit by earlier updates on the same samples
MISMATCH = 0.7  # standard deviation of the sampler's logits around the trainer's
UNBIASED = dict(baseline="leave_one_out", scale="none", aggregate="constant")
WHOLE = dict(baseline="leave_one_out", scale="none", aggregate="sequence", ratio="product")
OFF = dict(clip_low=1.0, clip_high=1e9)  # no clip


def config(**changes):
    """A Config for the audit: constants that the learning rate could absorb are 1."""
    return nr.Config(**dict(samples=4, max_tokens=1, kl_coef=0.0) | changes)


def number(x):
    """0.12, or 1,234 where it is large."""
    x = round(float(x), 9) + 0.0  # 7/8 is 0.88 whichever way the last bit fell, and 0 has no sign
    return f"{x:.2f}" if abs(x) < 100 else f"{x:,.0f}"


def cosine(x, wanted):
    """The cosine of two gradients; "0" if x is zero."""
    if x.norm() < 1e-12:
        return "0"
    return f"{torch.cosine_similarity(x.flatten(), wanted.flatten(), dim=0):.3f}"


def factor(x, wanted):
    """The part of x along `wanted`, as a multiple of it."""
    return number(x.flatten() @ wanted.flatten() / wanted.square().sum())


def noise(result):
    """The standard deviation of the gradient over its mean's length."""
    length = result.mean.norm().item()
    return "-" if length < 1e-12 else f"{math.sqrt(result.variance) / length:.1f}"


def make_questions(change=lambda question: question, knobs=(EASY, HARD)):
    return [change(Question(knob)) for knob in knobs]


def policy_row(cfg, questions):
    """The cells under POLICY. J and log p are means over the questions."""
    result = audit(cfg, questions)
    j = torch.stack([q.gradient(q.correct) for q in questions]) / len(questions)  # (Q, P)
    log_p = torch.stack([row / q.correct(q.logits) for q, row in zip(questions, j)])  # (Q, P)
    bias = (result.mean - j).norm() / j.norm()
    return [cosine(result.mean, j), cosine(result.mean, log_p),
            *(factor(x, row) for x, row in zip(result.mean, j)), number(bias), noise(result)]


POLICY = ["cos ∇J", "cos ∇log p", "× easy", "× hard", "bias", "noise"]
STALE = partial(make_questions, lambda question: after_updates(question, DRIFT))
NEAR = partial(make_questions, lambda question: with_sampler(question, MISMATCH))


def presets():
    rows = []
    for name, row in nr.ALGOS.items():
        # groups of four completions, as in all tables: reinforce++ itself takes one of each prompt
        cfg = config(**dict(kl_coef=nr.Config.kl_coef) | row | dict(samples=4))
        stale = policy_row(cfg, STALE())
        rows.append([f"`{name}`", *policy_row(cfg, make_questions()), stale[0], stale[-1]])
    return ["preset", *POLICY, "later: cos ∇J", "later: noise"], rows


def baselines_and_scales():
    rows = []
    for baseline in ("none", "running", "batch", "group", "leave_one_out"):
        for scale in ("none", "group", "batch"):
            cfg = config(baseline=baseline, scale=scale, aggregate="constant")
            rows.append([f"`{baseline}`", f"`{scale}`", *policy_row(cfg, make_questions())])
    return ["baseline", "scale", *POLICY], rows


def difficulties():
    rows, knobs = [], (EASY, MIDDLE, HARD)
    for scale in ("none", "group", "group_mean"):
        for n in (2, 8):
            cells = []
            for knob in knobs:
                [question] = make_questions(knobs=[knob])
                cfg = config(scale=scale, aggregate="constant", samples=n)
                mean = audit(cfg, [question]).mean
                cells.append(factor(mean, question.gradient(question.correct)))
            rows.append([f"`{scale}`", n, *cells])
    p = [q.correct(q.logits).item() for q in make_questions(knobs=knobs)]
    return ["scale", "n", *(f"× at p = {x:.2f}" for x in p)], rows


def aggregates():
    rows = []
    for aggregate in ("sequence", "token", "constant"):
        for baseline in ("leave_one_out", "none"):
            cfg = config(**UNBIASED | dict(aggregate=aggregate, baseline=baseline))
            rows.append([f"`{aggregate}`", f"`{baseline}`", *policy_row(cfg, make_questions())])
    return ["aggregate", "baseline", *POLICY], rows


def bounds():
    mean = WHOLE | dict(ratio="sequence")
    options = {
        "token ratio, no clip": UNBIASED | OFF,
        "token ratio, clip 0.2": UNBIASED,
        "product, no clip": WHOLE | OFF,
        "product, clip 0.2": WHOLE,
        "geometric mean, no clip": mean | OFF,
        "geometric mean, GSPO's clip": mean | dict(clip_low=3e-4, clip_high=4e-4),
        "detached weight, at most 5": UNBIASED | dict(surrogate="cispo", clip_high=4.0),
        "SAPO": UNBIASED | dict(surrogate="sapo"),
        "product, squared, tau 0.1": WHOLE | dict(surrogate="kimi", tau=0.1),
    }
    rows = [[name, *policy_row(config(**row), STALE())] for name, row in options.items()]
    return ["ratio and its bound", *POLICY], rows


def corrections():
    def as_ratio(question):
        question = with_sampler(question, MISMATCH)
        question.old = question.sampler
        return question

    rows = []
    for name, cap in (("none", 2.0), ("token_truncate", 1e9), ("token_truncate", 2.0),
                      ("token_mask", 2.0), ("sequence_mask", 1.2)):
        cfg = config(**UNBIASED, correction=name, correction_cap=cap)
        shown = "-" if name == "none" else "no cap" if cap == 1e9 else cap
        rows.append([f"`{name}`", shown, *policy_row(cfg, NEAR())])
    whole = policy_row(config(**WHOLE, **OFF), make_questions(as_ratio))
    rows.append(["weight of the whole completion", "no cap", *whole])
    return ["correction", "cap", *POLICY], rows


def kl_row(question, cfg, loss):
    """Cells: cosine and factor to each of four gradients, noise."""
    result = audit(cfg, [question], loss)
    cells = []
    for value in (question.kl, question.token_kl, question.other_kl, question.other_token_kl):
        wanted = -question.gradient(value)
        cells.append(f"{cosine(result.mean, wanted)} ({factor(result.mean, wanted)})")
    return [*cells, noise(result)]


def kl_terms():
    def no_reward(question):
        question.rewards = [0.0] * len(question.rewards)
        return question

    rows, constant = [], dict(aggregate="constant", kl_coef=1.0, samples=2)
    for place, step in (("loss", 0.0), ("loss, later", DRIFT)):
        for kind in KL_LOSSES:
            loss = nr.policy_loss if "script" in kind else partial(kl_loss, kind)
            [question] = make_questions(lambda q: no_reward(after_updates(q, step)), [MIDDLE])
            rows.append([place, kind, "`constant`", *kl_row(question, config(**constant), loss)])
    for axes in (UNBIASED, UNBIASED | dict(baseline="group"),
                 UNBIASED | dict(baseline="group", scale="group")):
        [question] = make_questions(lambda q: in_reward(q, "k1"), [MIDDLE])
        rows.append(["reward", "k1 (the script)", f"`{axes['baseline']}`, `{axes['scale']}`",
                     *kl_row(question, config(**axes, samples=2), nr.policy_loss)])
    return ["place", "estimator", "aggregate, or baseline and scale", "KL(π‖ref)",
            "next-token KL(π‖ref)", "KL(ref‖π)", "next-token KL(ref‖π)", "noise"], rows


TABLES = {"presets": presets, "baselines": baselines_and_scales, "difficulty": difficulties,
          "aggregates": aggregates, "bounds": bounds, "corrections": corrections, "kl": kl_terms}


def markdown(name):
    """A table of TABLES as Markdown."""
    header, rows = TABLES[name]()
    first, *others = ["| " + " | ".join(map(str, line)) + " |" for line in (header, *rows)]
    return "\n".join([first, f"|{'---|' * len(header)}", *others])


def mark(name):
    """Where a table begins and ends in the page, as a regular expression with three groups."""
    return re.compile(f"(<!-- table {name} -->\n)(.*?)(\n<!-- end -->)", re.S)


def main():
    text = PAGE.read_text()
    for name in TABLES:
        table = markdown(name)
        print(f"\n{name}\n{table}")
        text = mark(name).sub(lambda match: match[1] + table + match[3], text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
