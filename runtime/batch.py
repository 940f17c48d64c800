"""What a batch is: rollouts, the packs they are laid out in, and attention inside a pack.

It also decides which rank trains a sequence and which sequences share a forward pass. The gradient
depends on neither: see nano_rlvr.token_weights.
"""
import bisect
import dataclasses
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from runtime import ranks
from runtime.memory import ModelShape
from runtime.messages import RunError

TOLERANCE = 1.05  # a rank's cost / the mean cost: at most this, if rollouts allow it


@dataclass
class Rollout:
    """A prompt, one completion, and what the stages of nano_rlvr.py find out about it."""
    # filled by 1, rollout
    prompt: list[int]  # token ids
    completion: list[int]  # token ids with the end-of-sequence token: stopping is learned too
    text: str  # the completion without special tokens
    truncated: bool  # the completion was cut off at max_tokens
    vllm_logps: list[float]  # log-prob of each completion token, as vLLM sampled it
    loss_mask: list[bool] | None = None  # per completion token: False in a tool's output
    extra: dict[str, list[float]] = field(default_factory=dict)  # yours, with names not used here
    # filled by 2, score
    reward: float | None = None  # weighted sum of the parts; None = no reward
    parts: dict[str, float | None] = field(default_factory=dict)  # value of each reward function
    # filled by 3, assign_advantages
    advantages: list[float] | None = None  # of each completion token; None = 0
    # filled by 4, assign_token_weights
    weight: float = 0.0  # of each of its tokens in the loss; 0 = not trained

    def __post_init__(self):
        self.loss_mask = self.loss_mask or [True] * len(self.completion)
        self.advantages = self.advantages or [0.0] * len(self.completion)

    def __len__(self):
        """Number of all tokens, those of the prompt included."""
        return len(self.prompt) + len(self.completion)

    @property
    def length(self):
        """Number of sampled tokens."""
        return sum(self.loss_mask)

    def record(self):
        """What the logs of a run keep of every completion: a dict."""
        return {"completion": self.text, "reward": self.reward, "parts": self.parts,
                "tokens": self.length, "finish": "length" if self.truncated else "stop"}


def flatten(lists):
    """The items of all lists, in one list."""
    return list(itertools.chain.from_iterable(lists))


def in_groups(rollouts, n):
    """Rollouts in prompt order, n of each prompt -> a list of n per prompt."""
    return [rollouts[i:i + n] for i in range(0, len(rollouts), n)]


def deal(groups, hands):
    """Deals groups like cards into `hands` lists. None, a group of another rank, is left out.

    >>> deal(["a", "b", None, "d", "e"], 2)
    [['a', 'e'], ['b', 'd']]
    """
    return [list(filter(None, groups[i::hands])) for i in range(hands)]


# ---- packs and ranks

def skip_zero_advantages(rollouts, cfg):
    """Without a KL term, a sequence whose advantages are all 0 has no gradient: it needs no pass.

    Sets the weight of those to 0, and returns the others. The weights of the others stay: they come
    from the counts of all sequences. If none is left, the shortest stays: AdamW must step, which
    moves weights at gradient 0 too."""
    if cfg.kl_coef or cfg.surrogate == "kimi":  # its penalty has a gradient without an advantage
        return rollouts
    kept = [r for r in rollouts if any(r.advantages)] or sorted(rollouts, key=len)[:1]
    for r in rollouts:
        if not any(r.advantages) and r is not kept[0]:
            r.weight = 0.0
    return kept


def by_prompt(rollouts):
    """Splits the list into runs of rollouts that share a prompt."""
    return [list(group) for _, group in itertools.groupby(rollouts, key=lambda r: r.prompt)]


def pack(rollouts, budget):
    """First-fit bin packing: lists of rollouts of at most `budget` tokens. A longer one goes alone.

    The rollouts of a prompt are placed one after the other, the longest first: most of them share a
    pack, which runs their prompt once. For the budget, a prompt counts once per rollout."""
    packs, free = [], []  # free[i]: tokens left in packs[i]
    for group in sorted(by_prompt(rollouts), key=lambda group: sum(map(len, group)), reverse=True):
        for r in sorted(group, key=len, reverse=True):
            i = next((i for i, tokens in enumerate(free) if tokens >= len(r)), len(packs))
            if i == len(packs):
                packs.append([])
                free.append(budget)
            packs[i].append(r)
            free[i] -= len(r)
    # neighbours of one length may share a call of attend_in_groups
    return [sorted(members, key=len, reverse=True) for members in packs]


def divide(parts, cost):
    """Rollouts of each rank -> rollouts of each rank, so that their costs are nearly equal.

    cost: list of rollouts -> FLOPs; a prompt that several of them share counts once. A unit, the
    rollouts of a prompt, goes to the cheapest rank so far, costliest first (Graham 1969). One that
    would bring this rank above TOLERANCE times the mean is halved first, down to single rollouts.
    If the most expensive rank gains nothing, all stays as it is."""
    rollouts = flatten(parts)
    most = TOLERANCE * cost(rollouts) / len(parts)
    costs, divided = [0] * len(parts), [[] for _ in parts]
    units = sorted(by_prompt(rollouts), key=cost)
    while units:
        unit = units.pop()
        lowest = costs.index(min(costs))
        if costs[lowest] + cost(unit) > most and len(unit) > 1:
            for half in (unit[::2], unit[1::2]):
                bisect.insort(units, half, key=cost)
        else:
            divided[lowest] += unit
            costs[lowest] += cost(unit)
    best = min(parts, divided, key=lambda parts: max(map(cost, parts)))
    return [sorted(part, key=lambda r: r.prompt) for part in best]  # as neighbours


def balance(rollouts, model):
    """The rollouts that this rank trains, as divide() chose by FLOPs. Collective: every rank
    receives all rollouts and weights, at most 30 bytes per token, and 9 per number in extra."""
    if ranks.world_size() == 1:
        return rollouts
    return divide(ranks.all_gather([rollouts]), ModelShape.of(model).forward_flops)[ranks.rank()]


def pack_evenly(rollouts, dummy, budget):
    """pack(), with the same number of packs on every rank, because each backward pass is
    collective: ranks with fewer add `dummy`, with weight 0. Collective."""
    packs = pack(rollouts, budget)
    most = max(ranks.all_gather([len(packs)]))
    return packs + [[dataclasses.replace(dummy, weight=0.0)]] * (most - len(packs))


# ---- a pack as tensors

def collate(rollouts, device="cpu"):
    """A pack of B rollouts -> one row of T tokens: each prompt once, before its first completion.

    A prompt X with completions a and b becomes the row X a b. Attention runs per sequence: queries
    X a with keys X a, then queries b with keys X b. The causal mask is aligned to the end: b sees
    all of X. Sequence i has the queries cu_seqlens_q[i]:cu_seqlens_q[i+1] of the row and the keys
    kv_index[cu_seqlens_k[i]:cu_seqlens_k[i+1]]; kv_index (K,) has positions in the row. predictors
    (R,) are the positions whose output predicts the R sampled tokens; other completion tokens (a
    tool's output) are only read, like a prompt. old and ref are left to store_fixed_logps. extra
    has a tensor (R,) per name in the extra of the rollouts, which all have the same names.

    >>> a, b = (Rollout([5, 6], c, "", False, [0.0] * len(c)) for c in ([7, 8], [9]))
    >>> batch = collate([a, b])
    >>> batch.input_ids.tolist(), batch.position_ids.tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 3, 2]])
    >>> batch.cu_seqlens_q.tolist(), batch.kv_index.tolist(), batch.predictors.tolist()
    ([0, 4, 5], [0, 1, 2, 3, 0, 1, 4], [1, 2, 1])
    """
    input_ids, position_ids, kv_index, predictors = [], [], [], []
    cu_seqlens_q, cu_seqlens_k = [0], [0]
    prompt_at = {}  # prompt -> its positions in the row
    for r in rollouts:
        key = tuple(r.prompt)
        if key not in prompt_at:  # the first completion of a prompt stores it
            prompt_at[key] = range(len(input_ids), len(input_ids) + len(r.prompt))
            input_ids += r.prompt
            position_ids += range(len(r.prompt))
        completion_at = range(len(input_ids), len(input_ids) + len(r.completion))
        input_ids += r.completion
        position_ids += range(len(r.prompt), len(r))
        own = [*prompt_at[key], *completion_at]  # positions of this sequence in the row
        kv_index += own
        cu_seqlens_q.append(len(input_ids))
        cu_seqlens_k.append(len(kv_index))
        before = own[len(r.prompt) - 1:-1]  # the position before each completion token
        predictors += itertools.compress(before, r.loss_mask)
    sequence_ids = [i for i, r in enumerate(rollouts) for _ in range(r.length)]
    weights = [rollouts[i].weight for i in sequence_ids]

    def tensor(values, dtype=None):  # NumPy reads a list faster than torch.tensor
        values = np.fromiter(values, np.int64 if dtype else np.float64)
        return torch.from_numpy(values).to(device, dtype or torch.get_default_dtype())

    def sampled(name, dtype=None):  # that list of all rollouts, without tokens of a tool
        lists = [itertools.compress((r.extra | vars(r))[name], r.loss_mask) for r in rollouts]
        return tensor(flatten(lists), dtype)  # (R,)

    return SimpleNamespace(
        input_ids=tensor(input_ids, torch.int64)[None],  # (1, T)
        position_ids=tensor(position_ids, torch.int64)[None],  # (1, T)
        kv_index=tensor(kv_index, torch.int64),  # (K,)
        cu_seqlens_q=tensor(cu_seqlens_q, torch.int32),  # (B+1,)
        cu_seqlens_k=tensor(cu_seqlens_k, torch.int32),  # (B+1,)
        predictors=tensor(predictors, torch.int64),  # (R,)
        targets=sampled("completion", torch.int64),  # (R,)
        vllm_logps=sampled("vllm_logps"), advantage=sampled("advantages"),  # (R,), (R,)
        extra={name: sampled(name) for name in rollouts[0].extra},  # (R,) each
        weight=tensor(weights), sequence_ids=tensor(sequence_ids, torch.int64),  # (R,), (R,)
        lengths=tensor([r.length for r in rollouts], torch.int64),  # (B,) sampled tokens
        old=None, ref=None, max_seqlen=max(map(len, rollouts)))


def sequence_sum(x, batch):
    """(R,) -> (B,): the sum over each sequence."""
    return x.new_zeros(len(batch.lengths)).index_add(0, batch.sequence_ids, x)  # (B,)


def sequence_mean(x, batch):
    """(R,) -> (R,): each token gets the mean over its sequence."""
    return (sequence_sum(x, batch) / batch.lengths)[batch.sequence_ids]  # (R,)


# ---- attention

def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                     batch=None, **kwargs):
    """Causal attention inside each sequence of a pack. Registered with transformers as "packed".

    query (1, heads, T, d), key and value (1, kv heads, T, d) -> (1, T, heads, d), None. `batch` is
    what collate returns. There is no T x T mask: the cost is the sum over the sequences.

    Raises RunError for a mask of the model's own, a sliding window shorter than a sequence,
    attention sinks and soft caps."""
    others = [attention_mask, kwargs.get("s_aux"), kwargs.get("softcap")]
    window = kwargs.get("sliding_window") or batch.max_seqlen
    if window < batch.max_seqlen or any(x is not None for x in others):
        raise RunError("this model is not supported: its attention has a mask of its own, a window "
                       "shorter than --max_prompt + --max_tokens, sinks or a soft cap")
    q = query[0].transpose(0, 1)  # (T, heads, d)
    # Repeat the shared prompts. An embedding look-up, because its backward pass sums the gradients
    # of a token in fp32 and rounds once.
    k, v = (F.embedding(batch.kv_index, x[0].transpose(0, 1).flatten(1))  # (K, kv heads * d)
            .unflatten(1, (x.shape[1], x.shape[3])) for x in (key, value))  # (K, kv heads, d)
    attend = flash_attention if q.is_cuda and q.dtype is not torch.float32 else attend_in_groups
    return attend(q, k, v, batch, scaling)[None], None  # (1, T, heads, d)


def flash_attention(q, k, v, batch, scaling):
    """One kernel for all sequences; window_size makes it causal, aligned to the last key.
    q (T, heads, d), k and v (K, kv heads, d) -> (T, heads, d)."""
    from torch.nn.attention.varlen import varlen_attn  # late: the import takes a second
    return varlen_attn(
        q, k, v, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen, batch.max_seqlen,
        scale=scaling, window_size=(-1, 0), enable_gqa=True)  # (T, heads, d)


def attend_in_groups(q, k, v, batch, scaling):
    """The same with PyTorch's dense attention: one call per run of sequences with equal lengths."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # (K, heads, d)
    lengths = zip(batch.cu_seqlens_q.diff().tolist(), batch.cu_seqlens_k.diff().tolist())
    # sequences of m queries and n keys, b times in a row
    runs = [(m, n, len(list(run))) for (m, n), run in itertools.groupby(lengths)]
    # split(), not slices: the backward pass of a slice fills a tensor of full size with zeros
    q = q.split([b * m for m, n, b in runs])
    k, v = (x.split([b * n for m, n, b in runs]) for x in (k, v))
    out = []
    for (m, n, b), q_run, k_run, v_run in zip(runs, q, k, v):
        q_run, k_run, v_run = (  # (b, heads, m, d), (b, heads, n, d) twice
            x.unflatten(0, (b, -1)).transpose(1, 2) for x in (q_run, k_run, v_run))
        mask = None
        if m < n:  # a prompt stored earlier: these m queries are the last m of n positions
            mask = torch.ones(m, n, dtype=torch.bool, device=q_run.device).tril(n - m)  # (m, n)
        out_run = F.scaled_dot_product_attention(
            q_run, k_run, v_run, mask, is_causal=m == n, scale=scaling)  # (b, heads, m, d)
        out.append(out_run.transpose(1, 2).flatten(0, 1))  # (b * m, heads, d)
    return torch.cat(out)  # (T, heads, d)
