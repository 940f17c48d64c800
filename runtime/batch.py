"""What a batch is: rollouts, the packs they are laid out in, and attention inside a pack.

Which rank trains a sequence, and which sequences share a forward pass. The gradient depends on neither: see nano_rlvr.token_weights.
"""
import bisect
import dataclasses
import inspect
import itertools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from runtime import dist
from runtime.shape import ModelShape

TOLERANCE = 1.05  # highest cost of a rank over the mean cost


@dataclass
class Rollout:
    # stage 1, rollout
    prompt: list[int]  # token ids
    completion: list[int]  # token ids with the end-of-sequence token: stopping is learned too
    text: str  # the completion without special tokens
    truncated: bool  # the completion was cut off at max_tokens
    vllm_logps: list[float]  # log-prob of each completion token, as vLLM sampled it
    sampled: list[bool] | None = None  # per completion token: False in a tool's output; None = all True
    # stage 2, reward
    reward: float | None = None  # weighted sum of the parts; None = no verdict
    parts: dict[str, float | None] = field(default_factory=dict)  # value of each reward function
    steps: list[tuple[int, float]] = field(default_factory=list)  # (end, reward) per step; [] = outcome only
    # stage 3, advantage
    kl: float = 0.0  # sum over its tokens of log pi - log ref, with --kl_in reward
    advantages: list[float] | None = None  # of each completion token; None = 0
    # stage 4, pack
    weight: float = 0.0  # of each of its tokens in the loss; 0 = not trained

    def __post_init__(self):
        self.sampled = self.sampled or [True] * len(self.completion)
        self.advantages = self.advantages or [0.0] * len(self.completion)

    def __len__(self):
        return len(self.prompt) + len(self.completion)

    @property
    def length(self):  # number of sampled tokens
        return sum(self.sampled)


def pack(rollouts, budget):
    """First-fit bin packing: lists of rollouts of at most `budget` tokens. A longer one gets its own pack.

    The rollouts of a prompt stay together, because a pack runs a shared prompt once: largest group first, and
    in it the longest rollout first. The budget counts the prompt of every rollout: it is an upper bound.
    """
    groups = [list(group) for _, group in itertools.groupby(rollouts, key=lambda r: r.prompt)]
    groups.sort(key=lambda group: sum(map(len, group)), reverse=True)
    packs, free = [], []  # free[i]: tokens left in packs[i]
    for r in itertools.chain(*(sorted(group, key=len, reverse=True) for group in groups)):
        i = next((i for i, tokens in enumerate(free) if tokens >= len(r)), len(packs))
        if i == len(packs):
            packs.append([])
            free.append(budget)
        packs[i].append(r)
        free[i] -= len(r)
    return [sorted(members, key=len, reverse=True) for members in packs]


def divide(parts, cost):
    """Rollouts of each rank -> rollouts of each rank, so that the costs of the ranks are nearly equal.

    cost: list of rollouts -> FLOPs, a prompt that several of them share counted once. Stops at the first
    division whose highest cost is at most TOLERANCE times the mean: as they are; whole prompts, largest cost
    first, each to the rank with the lowest cost so far (Graham 1969); the same with the completions of a
    prompt in pieces, if together they cost more than 100, 30, 10, 3 % of the mean, or all apart. If none
    does, for example because one sequence costs too much, returns the one with the lowest highest cost.
    """
    rollouts = [r for part in parts for r in part]
    groups = [list(group) for _, group in itertools.groupby(rollouts, key=lambda r: r.prompt)]
    mean, best = cost(rollouts) / len(parts), parts
    for limit in (math.inf, 1.0, 0.3, 0.1, 0.03, 1e-9):
        if max(map(cost, best)) <= TOLERANCE * mean:
            break
        units = []
        for group in groups:
            pieces = min(len(group), max(1, math.ceil(cost(group) / (limit * mean))))
            units += [group[i::pieces] for i in range(pieces)]
        costs, divided = [0] * len(parts), [[] for _ in parts]
        for unit_cost, unit in sorted(((cost(unit), unit) for unit in units), key=lambda x: -x[0]):
            lowest = costs.index(min(costs))
            costs[lowest] += unit_cost
            divided[lowest] += unit
        best = min(best, divided, key=lambda parts: max(map(cost, parts)))
    return [sorted(part, key=lambda r: r.prompt) for part in best]  # the completions of a prompt in a row


def balance(rollouts, model):
    """The rollouts that this rank trains, copies from all ranks: divide() by the FLOPs of a forward pass.

    Their weights must have been assigned. Every rank receives all rollouts, 30 bytes per token or less.
    Collective; a single rank keeps its rollouts as they are.
    """
    if dist.world_size() == 1:
        return rollouts
    return divide(dist.all_gather([rollouts]), ModelShape.of(model).forward_flops)[dist.rank()]


def pack_evenly(rollouts, filler, budget):
    """pack(), with as many packs on every rank: ranks with fewer add the rollout `filler` with weight 0.

    Collective, like the backward pass of each pack: all ranks must make the same number of them.
    """
    packs = pack(rollouts, budget)
    most = max(dist.all_gather([len(packs)]))
    return packs + [[dataclasses.replace(filler, weight=0.0)]] * (most - len(packs))


def collate(rollouts, device="cpu"):
    """A pack of B rollouts -> one row of T tokens: each prompt once, before its first completion.

    A prompt P with completions a and b becomes the row P a b. Attention runs per sequence: queries P a with
    keys P a, then queries b with keys P b. The causal mask is aligned to the end: b sees all of P.
    Sequence i has the queries cu_seqlens_q[i]:cu_seqlens_q[i+1] of the row and the keys
    kv_index[cu_seqlens_k[i]:cu_seqlens_k[i+1]]; kv_index holds positions in the row. predictors (R,) are the
    positions whose output predicts the R sampled tokens; other completion tokens (a tool's output) are only
    read, like a prompt. old and ref are left to store_fixed_logps.
    """
    def concatenate(lists, dtype):  # NumPy reads a list five times faster than torch.tensor
        return torch.from_numpy(np.fromiter(itertools.chain.from_iterable(lists), dtype))

    # All sequences with their prompts, P a P b: K tokens. The row keeps the first copy of each prompt.
    tokens = concatenate(([*r.prompt, *r.completion] for r in rollouts), np.int64)  # (K,)
    prompt_lengths = torch.tensor([len(r.prompt) for r in rollouts])  # (B,)
    completion_lengths = torch.tensor([len(r.completion) for r in rollouts])  # (B,)
    lengths = prompt_lengths + completion_lengths  # (B,)
    end = lengths.cumsum(0)  # (B,)
    sequence = torch.arange(len(rollouts)).repeat_interleave(lengths)  # (K,) number of the sequence
    position = torch.arange(len(tokens)) - (end - lengths)[sequence]  # (K,) in the sequence
    is_completion = position >= prompt_lengths[sequence]  # (K,)
    first = {}  # prompt -> the first sequence that has it
    keeper = torch.tensor([first.setdefault(tuple(r.prompt), i) for i, r in enumerate(rollouts)])  # (B,)
    kept_in = torch.where(is_completion, sequence, keeper[sequence])  # (K,) sequence with the copy to keep
    kept_as = (end - lengths)[kept_in] + position  # (K,) which of the K tokens is that copy
    kept = kept_as == torch.arange(len(tokens))  # (K,) T of them
    kv_index = (kept.cumsum(0) - 1)[kept_as]  # (K,) position of that copy in the row
    sampled = concatenate((r.sampled for r in rollouts), bool)  # (completion tokens,) R of them are true
    completion = is_completion.nonzero()[:, 0][sampled]  # (R,)
    sequence_ids = sequence[completion]  # (R,)
    weight = torch.tensor([r.weight for r in rollouts])[sequence_ids]  # (R,)
    batch = dict(
        input_ids=tokens[kept][None], position_ids=position[kept][None],  # (1, T), (1, T)
        kv_index=kv_index, predictors=kv_index[completion - 1],  # (K,), (R,) the token before each one
        cu_seqlens_q=F.pad(kv_index[end - 1] + 1, (1, 0)).int(),  # (B+1,)
        cu_seqlens_k=F.pad(end, (1, 0)).int(),  # (B+1,)
        targets=tokens[completion],  # (R,)
        vllm_logps=concatenate((r.vllm_logps for r in rollouts), np.float64)[sampled].to(weight),  # (R,)
        advantage=concatenate((r.advantages for r in rollouts), np.float64)[sampled].to(weight),  # (R,)
        weight=weight, sequence_ids=sequence_ids,  # (R,), (R,)
        lengths=sequence_ids.bincount(minlength=len(rollouts)))  # (B,) sampled tokens
    batch = {name: x.to(device) for name, x in batch.items()}
    return SimpleNamespace(**batch, old=None, ref=None, max_seqlen=int(lengths.max()))


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, batch=None,
                     **kwargs):
    """Causal attention inside each sequence of a pack. Registered with transformers as "packed".

    query (1, heads, T, d), key and value (1, kv heads, T, d) -> (1, T, heads, d), None. `batch` is what
    collate returns; its docstring says which queries and keys a sequence has. There is no T x T
    mask: the cost is the sum over the sequences.

    Raises ValueError for a mask of the model's own, a sliding window shorter than a sequence, attention sinks
    and soft caps.
    transformers can detect packed rows itself, but silently skips that when a KV cache is on; here `batch` is
    required.
    """
    window = kwargs.get("sliding_window")
    if window and batch.max_seqlen > window:
        raise ValueError(f"sliding-window attention ({window} tokens) is not supported "
                         f"for {batch.max_seqlen} tokens")
    if attention_mask is not None:  # transformers makes none for a registered function
        raise ValueError("attention with a mask of the model's own is not supported")
    if any(kwargs.get(name) is not None for name in ("s_aux", "softcap")):
        raise ValueError("attention with sinks or a soft cap is not supported")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, d), (T, kv heads, d) twice
    # Repeat the shared prompts. An embedding look-up, because its backward pass sums the gradients of a
    # token in fp32 and rounds once.
    k, v = (F.embedding(batch.kv_index, x.flatten(1)) for x in (k, v))  # (K, kv heads * d)
    k, v = (x.unflatten(1, key.shape[1::2]) for x in (k, v))  # (K, kv heads, d)
    attend = flash_attention if q.is_cuda and q.dtype is not torch.float32 else attend_in_groups
    return attend(q, k, v, batch, scaling)[None], None  # (1, T, heads, d)


def repeat_heads(x, q):
    """x (K, kv heads, d) -> (K, heads, d): each key or value once per query head of q that shares it."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def flash_attention(q, k, v, batch, scaling):
    """One kernel for all sequences; the last query of each sees its last key.

    q (T, heads, d), k and v (K, kv heads, d) -> (T, heads, d).
    """
    from torch.nn.attention.varlen import varlen_attn  # here: it brings torch._dynamo, a second
    gqa = {"enable_gqa": True}
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch 2.11
        gqa, k, v = {}, repeat_heads(k, q), repeat_heads(v, q)  # (K, heads, d) twice
    return varlen_attn(q, k, v, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen, batch.max_seqlen,
                       scale=scaling, window_size=(-1, 0), **gqa)  # (T, heads, d)


def attend_in_groups(q, k, v, batch, scaling):
    """The same with PyTorch's dense attention: one call per run of sequences with equal lengths."""
    k, v = repeat_heads(k, q), repeat_heads(v, q)  # (K, heads, d) twice
    lengths = zip(batch.cu_seqlens_q.diff().tolist(), batch.cu_seqlens_k.diff().tolist())
    # sequences of m queries and n keys, b times in a row
    runs, out = [(m, n, len(list(run))) for (m, n), run in itertools.groupby(lengths)], []
    # split(), not slices: the backward pass of a slice fills a tensor of full size with zeros
    q = q.split([b * m for m, n, b in runs])
    k, v = (x.split([b * n for m, n, b in runs]) for x in (k, v))
    for (m, n, b), q_run, k_run, v_run in zip(runs, q, k, v):
        q_run = q_run.unflatten(0, (b, m)).transpose(1, 2)  # (b, heads, m, d)
        k_run, v_run = (x.unflatten(0, (b, n)).transpose(1, 2) for x in (k_run, v_run))  # (b, heads, n, d)
        # a prompt stored earlier: these m queries are the last m of n positions
        mask = None  # (m, n)
        if m < n:
            mask = torch.ones(m, n, dtype=torch.bool, device=q_run.device).tril(n - m)
        out_run = F.scaled_dot_product_attention(
            q_run, k_run, v_run, mask, is_causal=m == n, scale=scaling)  # (b, heads, m, d)
        out.append(out_run.transpose(1, 2).flatten(0, 1))  # (b * m, heads, d)
    return torch.cat(out)  # (T, heads, d)


def sequence_sum(x, batch):
    """(R,) -> (B,): the sum over each sequence."""
    return x.new_zeros(len(batch.lengths)).index_add(0, batch.sequence_ids, x)  # (B,)


def sequence_mean(x, batch):
    """(R,) -> (R,): each token gets the mean over its sequence."""
    return (sequence_sum(x, batch) / batch.lengths)[batch.sequence_ids]  # (R,)


def step_ends_in_tokens(rollouts, tokenizer):
    """Replaces the end of each step in r.steps, a number of characters of r.text, by a number of tokens.

    A step ends with the token that completes its last character (a character may have several tokens). A step
    that covers the whole text also covers the tokens after it, which have no text: the end of the sequence.
    """
    for r in (r for r in rollouts if r.steps):
        pieces = tokenizer.batch_decode([[token] for token in r.completion], skip_special_tokens=True)
        covered = list(itertools.accumulate(map(len, pieces)))  # characters
        exact = "".join(pieces) == r.text  # no token has a part of a character or depends on those before it

        def complete(tokens, end):  # whether the first `tokens` tokens give the first `end` characters
            if exact:  # without decoding each prefix, which takes seconds for a long completion
                return covered[tokens - 1] >= end
            text = tokenizer.decode(r.completion[:tokens], skip_special_tokens=True)
            return text[:end] == r.text[:end]

        def tokens_of(end):
            if end == len(r.text):
                return len(r.completion)
            return 1 + bisect.bisect_left(range(1, len(r.completion)), True, key=lambda k: complete(k, end))

        r.steps = [(tokens_of(end), value) for end, value in r.steps]


def step_rewards(groups, cfg):
    """(G, n K): the K rewards of the steps of each rollout, for the groups of all ranks, in the order of the
    ranks. An outcome reward is one step; shorter lists are filled with NaN. r.kl is subtracted from the last
    step. Collective."""
    rows = []
    for group in groups:
        rows.append([[x for _, x in r.steps] or [math.nan if r.reward is None else r.reward] for r in group])
        for r, values in zip(group, rows[-1]):
            values[-1] -= cfg.kl_coef * r.kl
    rows = dist.all_gather(rows)  # concatenates the ranks' lists
    K = max((len(x) for row in rows for x in row), default=1)
    rows = [[x + [math.nan] * (K - len(x)) for x in row] for row in rows]
    return torch.tensor(rows).view(-1, cfg.samples * K)


def set_advantages(groups, advantages):
    """Fills r.advantages: each completion token gets the sum of the advantages of all steps that end at it or
    after it. advantages (G, n K): those of the steps of all ranks. Collective."""
    start = sum(dist.all_gather([len(groups)])[:dist.rank()])  # groups of the ranks before this one
    for group, row in zip(groups, advantages[start:].tolist()):
        K = len(row) // len(group)
        for i, r in enumerate(group):
            at_end = np.zeros(len(r.completion))  # of the steps that end with this token
            for (end, _), advantage in zip(r.steps or [(len(r.completion), r.reward)], row[i * K:]):
                at_end[end - 1] += advantage
            r.advantages = at_end[::-1].cumsum()[::-1].tolist()
