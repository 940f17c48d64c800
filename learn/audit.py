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
from statistics import fmean
from types import SimpleNamespace
from typing import NamedTuple

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
    different = set()
    for string in strings:
        if END in string:
            string = string[:string.index(END) + 1]
        different.add(string)
    return sorted(different, key=lambda s: (len(s), s))


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
        self.lengths = torch.tensor([len(c) for c in self.completions])  # (S,)
        self.sequence_ids = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)  # (R,)
        before = []  # of each token, the prefix that it continues
        tokens = []
        for completion in self.completions:
            tokens += completion
            before += [completion[:t] for t in range(len(completion))]
        self.prefixes = sorted(set(before))
        rows = [self.prefixes.index(prefix) for prefix in before]
        self.at = torch.tensor([rows, tokens])  # (2, R)
        self.rewards = [float(is_right(c)) for c in self.completions]
        self.logits = self.noise(rng, 0.7)
        self.logits[:, 1] += knob  # how often the policy writes a 1: how easy the question is
        self.logits[:, END] += 0.7  # so that lengths differ
        self.ref = self.logits + self.noise(rng, 1.2)  # (prefixes, TOKENS)
        self.sampler = self.logits  # (prefixes, TOKENS)
        self.old = None

    def noise(self, rng, deviation):
        """A table of Gaussian numbers, the same on each machine."""
        count = len(self.prefixes) * TOKENS
        numbers = [rng.gauss(0, deviation) for _ in range(count)]
        return torch.tensor(numbers, dtype=torch.float64).view(-1, TOKENS)  # (prefixes, TOKENS)

    def logps(self, logits):
        """(prefixes, TOKENS) -> (R,): the log-prob of each token of all completions."""
        rows, tokens = self.at  # (R,) each
        return logits.log_softmax(-1)[rows, tokens]  # (R,)

    def total(self, x):
        """(R,) -> (S,): the sum over each completion."""
        zeros = x.new_zeros(len(self.lengths))  # (S,)
        return zeros.index_add(0, self.sequence_ids, x)  # (S,)

    def probs(self, logits):
        """(prefixes, TOKENS) -> (S,): the probability of each completion."""
        return self.total(self.logps(logits)).exp()  # (S,)

    def gradient(self, value):
        """The gradient (P,) of value(logits) at the policy's logits."""
        return torch.func.grad(value)(self.logits).flatten()  # (P,)

    # what one may want to climb, or to descend

    def correct(self, logits):
        """J: the mean reward, which is the probability of a right completion."""
        rewards = torch.tensor(self.rewards, dtype=torch.float64)  # (S,)
        return self.probs(logits) @ rewards  # ()

    def kl(self, logits):
        """KL(pi || ref) of whole completions."""
        log_ratio = self.logps(logits) - self.logps(self.ref)  # (R,)
        return self.probs(logits) @ self.total(log_ratio)  # ()

    def other_kl(self, logits):
        """KL(ref || pi) of whole completions."""
        log_ratio = self.logps(self.ref) - self.logps(logits)  # (R,)
        return self.probs(self.ref) @ self.total(log_ratio)  # ()

    def token_kl(self, logits):
        """KL(pi || ref) of the next token, summed over the prefixes that pi visits, kept fixed."""
        p = logits.log_softmax(-1)  # (prefixes, TOKENS)
        ref = self.ref.log_softmax(-1)  # (prefixes, TOKENS)
        at_prefix = (p.exp() * (p - ref)).sum(-1)  # (prefixes,)
        return self.visits() @ at_prefix  # ()

    def other_token_kl(self, logits):
        """KL(ref || pi) of the next token, summed over the prefixes that pi visits, kept fixed."""
        p = logits.log_softmax(-1)  # (prefixes, TOKENS)
        ref = self.ref.log_softmax(-1)  # (prefixes, TOKENS)
        at_prefix = (ref.exp() * (ref - p)).sum(-1)  # (prefixes,)
        return self.visits() @ at_prefix  # ()

    def visits(self):
        """(prefixes,): how often the policy reaches each prefix."""
        probs = self.probs(self.logits)[self.sequence_ids]  # (R,)
        zeros = probs.new_zeros(len(self.prefixes))  # (prefixes,)
        return zeros.index_add(0, self.at[0], probs)  # (prefixes,)


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

class Kind(NamedTuple):
    """Completions of a question with the same advantage and weight in each group."""
    reward: float
    length: int  # 0 where no weight depends on the others' lengths
    members: list  # numbers of the completions


def kinds_of(question, cfg):
    """The Kinds of a question, in the order of their first members."""
    members = {}
    for s, reward in enumerate(question.rewards):
        length = len(question.completions[s]) if cfg.aggregate == "token" else 0
        members.setdefault((reward, length), []).append(s)
    return [Kind(*key, numbers) for key, numbers in members.items()]


def audit(cfg, questions, loss=nr.policy_loss, eps=1e-4):
    """Mean (Q, P) and variance of the gradient of one step, with a group for each of Q questions.

    The groups are enumerated by the Kinds of their members, and what completions of a kind do is
    averaged inside, which gives the same sums.
    """
    tables = [tables_of(question, cfg) for question in questions]
    kinds = [kinds_of(question, cfg) for question in questions]
    groups = []
    for question, of_question in zip(questions, kinds):
        members = [kind.members for kind in of_question]
        groups.append(enumerate_groups(question, members, cfg.samples))
    accuracies = [q.correct(q.sampler).item() for q in questions]
    running = fmean(accuracies)  # where the moving average would settle

    @cache
    def advantages(rewards):
        rewards = torch.tensor(rewards, dtype=torch.float64)  # (P, G)
        result = nr.group_advantages(rewards, cfg.baseline, cfg.scale, eps, running)  # (P, G)
        return result.tolist()

    @cache
    def moments(q, kind, *numbers):
        members = kinds[q][kind].members
        return kind_moments(cfg, tables[q], members, loss, *numbers)

    parameters = questions[0].logits.numel()
    mean = np.zeros((len(questions), parameters))  # (Q, P)
    square = 0.0
    for outcome in itertools.product(*groups):  # one group of each question
        probability = math.prod(p for _, p in outcome)
        kept = {}  # {question: kinds of its group}, without the groups that make no update
        rewards = []
        tokens = 0
        for q, (group, _) in enumerate(outcome):
            row = tuple(kinds[q][k].reward for k in group)
            if cfg.filter_groups and len(set(row)) == 1:
                continue
            kept[q] = group
            rewards.append(row)
            tokens += sum(kinds[q][k].length for k in group)
        if not kept:
            continue  # no update
        step = np.zeros_like(mean)  # (Q, P)
        spread = 0.0
        sequences = len(kept) * cfg.samples
        rows = advantages(tuple(rewards))
        for (q, group), row in zip(kept.items(), rows):
            members = Counter(zip(group, row))
            for (k, advantage), count in members.items():
                kind_mean, kind_square = moments(q, k, advantage, sequences, tokens)
                step[q] += count * kind_mean
                spread += count * (kind_square - kind_mean @ kind_mean)
        mean += probability * step
        square += probability * ((step**2).sum() + spread)
    variance = square - (mean**2).sum()
    return SimpleNamespace(mean=torch.from_numpy(mean), variance=variance)


def enumerate_groups(question, kinds, n):
    """All groups of n as (kinds of the members, probability), without regard to their order."""
    probs = question.probs(question.sampler)  # (S,)
    share = [probs[members].sum().item() for members in kinds]
    groups = []
    for group in itertools.combinations_with_replacement(range(len(share)), n):
        orders = math.factorial(n)
        for count in Counter(group).values():
            orders //= math.factorial(count)
        probability = math.prod(share[k] for k in group)
        groups.append((group, orders * probability))
    return groups


def tables_of(question, cfg):
    """What kind_moments looks up: log-probs (R,), their gradients (R, P), probabilities (S,)."""
    old = None
    if question.old is not None:
        old = question.logps(question.old)  # (R,)
    slopes = torch.func.jacrev(question.logps)(question.logits)  # (R, prefixes, TOKENS)
    return SimpleNamespace(
        logp=question.logps(question.logits),
        vllm=question.logps(question.sampler),
        old=old,
        ref=question.logps(question.ref) if cfg.kl_coef else None,
        scores=slopes.flatten(1),
        probs=question.probs(question.sampler),
        lengths=question.lengths,
        sequence_ids=question.sequence_ids,
    )


def kind_moments(cfg, tables, members, loss, advantage, sequences, tokens):
    """Mean (P,) and mean square of the gradient of one completion of a kind, given its advantage.

    The loss is nano_rlvr's. It is differentiated by the log-probs of the tokens, and these by the
    logits.
    """
    rows = torch.isin(tables.sequence_ids, torch.tensor(members))  # (R,) tokens of these
    lengths = tables.lengths[members]  # (B,)
    weights = nr.token_weights(lengths.tolist(), cfg.aggregate, cfg.max_tokens, sequences, tokens)
    weights = torch.tensor(weights, dtype=torch.float64)  # (B,)
    owner = torch.arange(len(members)).repeat_interleave(lengths)  # (r,)
    weight = weights[owner]  # (r,)
    pack = SimpleNamespace(
        sequence_ids=owner,
        lengths=lengths,
        vllm_logps=tables.vllm[rows],
        advantage=torch.full_like(weight, advantage),
        weight=weight,
    )
    logp = tables.logp[rows].requires_grad_()  # (r,)
    old = None if tables.old is None else tables.old[rows]  # (r,)
    ref = None if tables.ref is None else tables.ref[rows]  # (r,)
    value, _ = loss(logp, old, ref, pack, cfg)  # ()
    [slope] = torch.autograd.grad(-value, logp)  # (r,)
    of_tokens = slope[:, None] * tables.scores[rows]  # (r, P)
    gradients = of_tokens.new_zeros(len(members), of_tokens.shape[1])  # (B, P)
    gradients.index_add_(0, owner, of_tokens)  # (B, P)
    probs = tables.probs[members]  # (B,)
    share = probs / probs.sum()  # (B,)
    mean = share @ gradients  # (P,)
    mean_square = share @ gradients.square().sum(1)  # ()
    return mean.numpy(), mean_square.item()


# ---- estimators of the KL that the script does not have

def from_here(x, pack):
    """(r,) -> (r,): the sum over this token and the later ones of its completion."""
    sums = []
    for part in x.split(pack.lengths.tolist()):
        backwards = part.flip(0)
        sums.append(backwards.cumsum(0).flip(0))
    return torch.cat(sums)  # (r,)


# Each of these is a value per token, (r,). k1, k2, k3: joschu.net/blog/kl-approx.html

def k1(logp, old, ref, pack):
    return logp - ref  # (r,)


def k2(logp, old, ref, pack):
    return (logp - ref)**2 / 2  # (r,)


def k3(logp, old, ref, pack):
    return nr.k3(logp, ref)  # (r,)


def weighted_k3(logp, old, ref, pack):
    """TRL's use_bias_correction_kl."""
    ratio = (logp - old).exp()  # (r,)
    return ratio * nr.k3(logp, ref)  # (r,)


def later_k1(logp, old, ref, pack):
    """arXiv:2506.09477: a token answers for the log-ratios of all later tokens as well."""
    log_ratio = (logp - ref).detach()  # (r,)
    return from_here(log_ratio, pack) * logp  # (r,)


KL_LOSSES = {
    "k1": k1,
    "k2": k2,
    "k3 (the script)": k3,
    "k3 times pi/old": weighted_k3,
    "unbiased: k1 of all later tokens, times log pi": later_k1,
}


def kl_loss(kind, logp, old, ref, pack, cfg):
    """In place of nano_rlvr.policy_loss: the KL alone."""
    old = logp.detach() if old is None else old  # (r,)
    per_token = KL_LOSSES[kind](logp, old, ref, pack)  # (r,)
    return (pack.weight * per_token).sum(), {}


def in_reward(question, kind):
    """The same question with minus the KL of the completion, by this estimator, as reward."""
    logp = question.logps(question.sampler)  # (R,)
    ref = question.logps(question.ref)  # (R,)
    kl = question.total(KL_LOSSES[kind](logp, logp, ref, None))  # (S,)
    question.rewards = (-kl).tolist()
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
    flags = dict(samples=4, max_tokens=1, kl_coef=0.0)
    return nr.Config(**flags | changes)


def number(x):
    """0.12, or 1,234 where it is large."""
    x = round(float(x), 9) + 0.0  # 7/8 is 0.88 whichever way the last bit fell, and 0 has no sign
    return f"{x:.2f}" if abs(x) < 100 else f"{x:,.0f}"


def cosine(x, wanted):
    """The cosine of two gradients; "0" if x is zero."""
    if x.norm() < 1e-12:
        return "0"
    value = torch.cosine_similarity(x.flatten(), wanted.flatten(), dim=0)  # ()
    return f"{value:.3f}"


def factor(x, wanted):
    """The part of x along `wanted`, as a multiple of it."""
    product = x.flatten() @ wanted.flatten()  # ()
    return number(product / wanted.square().sum())


def noise(result):
    """The standard deviation of the gradient over its mean's length."""
    length = result.mean.norm().item()
    return "-" if length < 1e-12 else f"{math.sqrt(result.variance) / length:.1f}"


def make_questions(change=lambda question: question, knobs=(EASY, HARD)):
    return [change(Question(knob)) for knob in knobs]


def policy_row(cfg, questions):
    """The cells under POLICY. J and log p are means over the questions."""
    result = audit(cfg, questions)
    gradients = [q.gradient(q.correct) for q in questions]
    j = torch.stack(gradients) / len(questions)  # (Q, P)
    accuracies = torch.stack([q.correct(q.logits) for q in questions])  # (Q,)
    log_p = j / accuracies[:, None]  # (Q, P)
    bias = (result.mean - j).norm() / j.norm()  # ()
    factors = [factor(x, row) for x, row in zip(result.mean, j)]
    return [
        cosine(result.mean, j),
        cosine(result.mean, log_p),
        *factors,
        number(bias),
        noise(result),
    ]


POLICY = ["cos ∇J", "cos ∇log p", "× easy", "× hard", "bias", "noise"]
STALE = partial(make_questions, lambda question: after_updates(question, DRIFT))
NEAR = partial(make_questions, lambda question: with_sampler(question, MISMATCH))


def presets():
    rows = []
    for name, row in nr.ALGOS.items():
        # groups of four completions, as in all tables: reinforce++ itself takes one of each prompt
        flags = dict(kl_coef=nr.Config.kl_coef) | row
        cfg = config(**flags | dict(samples=4))
        fresh = policy_row(cfg, make_questions())
        stale = policy_row(cfg, STALE())
        rows.append([f"`{name}`", *fresh, stale[0], stale[-1]])
    return ["preset", *POLICY, "later: cos ∇J", "later: noise"], rows


def baselines_and_scales():
    rows = []
    for baseline in ("none", "running", "batch", "group", "leave_one_out"):
        for scale in ("none", "group", "batch"):
            cfg = config(baseline=baseline, scale=scale, aggregate="constant")
            cells = policy_row(cfg, make_questions())
            rows.append([f"`{baseline}`", f"`{scale}`", *cells])
    return ["baseline", "scale", *POLICY], rows


def difficulties():
    knobs = (EASY, MIDDLE, HARD)
    rows = []
    for scale in ("none", "group", "group_mean"):
        for n in (2, 8):
            cells = []
            for knob in knobs:
                [question] = make_questions(knobs=[knob])
                cfg = config(scale=scale, aggregate="constant", samples=n)
                mean = audit(cfg, [question]).mean
                cells.append(factor(mean, question.gradient(question.correct)))
            rows.append([f"`{scale}`", n, *cells])
    header = ["scale", "n"]
    for question in make_questions(knobs=knobs):
        p = question.correct(question.logits).item()
        header.append(f"× at p = {p:.2f}")
    return header, rows


def aggregates():
    rows = []
    for aggregate in ("sequence", "token", "constant"):
        for baseline in ("leave_one_out", "none"):
            cfg = config(**UNBIASED | dict(aggregate=aggregate, baseline=baseline))
            cells = policy_row(cfg, make_questions())
            rows.append([f"`{aggregate}`", f"`{baseline}`", *cells])
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
    rows = []
    for name, flags in options.items():
        rows.append([name, *policy_row(config(**flags), STALE())])
    return ["ratio and its bound", *POLICY], rows


def corrections():
    def as_ratio(question):
        question = with_sampler(question, MISMATCH)
        question.old = question.sampler
        return question

    options = [  # (correction, cap, how the table names the cap)
        ("none", 2.0, "-"),
        ("token_truncate", 1e9, "no cap"),
        ("token_truncate", 2.0, 2.0),
        ("token_mask", 2.0, 2.0),
        ("sequence_mask", 1.2, 1.2),
    ]
    rows = []
    for name, cap, shown in options:
        cfg = config(**UNBIASED, correction=name, correction_cap=cap)
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

    rows = []
    cfg = config(aggregate="constant", kl_coef=1.0, samples=2)
    for place, step in (("loss", 0.0), ("loss, later", DRIFT)):
        for kind in KL_LOSSES:
            loss = nr.policy_loss if "script" in kind else partial(kl_loss, kind)
            question = no_reward(after_updates(Question(MIDDLE), step))
            rows.append([place, kind, "`constant`", *kl_row(question, cfg, loss)])
    for baseline, scale in (("leave_one_out", "none"), ("group", "none"), ("group", "group")):
        cfg = config(baseline=baseline, scale=scale, aggregate="constant", samples=2)
        question = in_reward(Question(MIDDLE), "k1")
        cells = kl_row(question, cfg, nr.policy_loss)
        rows.append(["reward", "k1 (the script)", f"`{baseline}`, `{scale}`", *cells])
    return ["place", "estimator", "aggregate, or baseline and scale", "KL(π‖ref)",
            "next-token KL(π‖ref)", "KL(ref‖π)", "next-token KL(ref‖π)", "noise"], rows


TABLES = {
    "presets": presets,
    "baselines": baselines_and_scales,
    "difficulty": difficulties,
    "aggregates": aggregates,
    "bounds": bounds,
    "corrections": corrections,
    "kl": kl_terms,
}


def markdown(name):
    """A table of TABLES as Markdown."""
    header, rows = TABLES[name]()
    lines = []
    for row in (header, *rows):
        cells = " | ".join(map(str, row))
        lines.append(f"| {cells} |")
    lines.insert(1, f"|{'---|' * len(header)}")
    return "\n".join(lines)


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
