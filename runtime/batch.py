"""The rollouts of a step, the packs or rows they are laid out in, and attention inside a pack.

It also decides which sequences share a forward pass. The gradient does not depend on that: see
nano_rlvr.token_weights. There are two layouts. "packed": sequences stand end to end in one row of T
tokens, which needs attention that can be told where they end. "rows": B sequences of similar length
stand in rows of L tokens, padded on the right. No mask is needed, because in a causal model no
token sees what stands to its right, be it by attention, convolution or recurrence.
"""
import itertools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from runtime import ranks
from runtime.messages import RunError

SIMILAR = 0.85  # in the layout `rows`: length of a sequence / the longest one's of its pack


@dataclass
class Rollout:
    """A prompt, one completion, and what the stages of nano_rlvr.py find out about it."""
    # filled by 1, rollout
    prompt: list[int]  # token ids
    completion: list[int]  # token ids with the end-of-sequence token: stopping is learned too
    text: str  # the completion as the rewards read it: see data.completion_texts
    truncated: bool  # the completion was cut off at max_tokens
    vllm_logps: list[float]  # log-prob of each completion token, as vLLM sampled it
    loss_mask: list[bool] | None = None  # per completion token: False in a tool's output
    extra: dict[str, list[float]] = field(default_factory=dict)  # yours, with names not used here
    outcome: float | None = None  # of a game or tool, for the rewards; None = it has none
    # filled by 2, score
    reward: float | None = None  # weighted sum of the parts; None = no reward
    parts: dict[str, float | None] = field(default_factory=dict)  # value of each reward function
    # filled by 3, assign_advantages
    advantages: list[float] | None = None  # of each completion token; None = 0
    # filled by 4, assign_token_weights
    weight: float = 0.0  # of each of its tokens in the loss; 0 = not trained

    def __post_init__(self):
        n = len(self.completion)
        self.loss_mask = self.loss_mask or [True] * n
        self.advantages = self.advantages or [0.0] * n

    def __len__(self):
        """Number of all tokens, those of the prompt included."""
        return len(self.prompt) + len(self.completion)

    @property
    def length(self):
        """Number of sampled tokens."""
        return sum(self.loss_mask)

    def record(self):
        """What the logs of a run keep of every completion: a dict."""
        return {
            "completion": self.text,
            "reward": self.reward,
            "parts": self.parts,
            "tokens": self.length,
            "finish": "length" if self.truncated else "stop",
        }


def flatten(lists):
    """The items of all lists, in one list."""
    return list(itertools.chain.from_iterable(lists))


def in_groups(rollouts, n):
    """Rollouts in prompt order, n of each prompt -> a list of n per prompt."""
    return [rollouts[i:i + n] for i in range(0, len(rollouts), n)]


def deal(groups, hands):
    """Deals groups, {position: group}, like cards into `hands` lists, by their position.

    >>> deal({0: "a", 1: "b", 3: "d", 4: "e"}, 2)
    [['a', 'e'], ['b', 'd']]
    """
    lists = [[] for _ in range(hands)]
    for position, group in groups.items():
        lists[position % hands].append(group)
    return lists


def first_groups(draws, most):
    """Of the groups of all ranks the first `most` in data order: by draw, by rank, by prompt.

    draws: a list per draw with this rank's groups. -> ({position: group} of this rank's groups,
    whether there are `most`). Collective.
    """
    counts = ranks.all_gather([list(map(len, draws))])  # of each rank: groups per draw
    kept = {}
    position = 0
    for draw, groups in enumerate(draws):
        for rank in range(ranks.world_size()):
            if rank == ranks.rank():
                room = max(0, most - position)
                kept.update(enumerate(groups[:room], position))
            position += counts[rank][draw]
    return kept, position >= most


def reward_table(groups, samples):
    """The rewards of all ranks' groups -> (P, G), NaN where there is none, and the slice of its
    rows that belongs to `groups`. Collective."""
    reward = [math.nan if r.reward is None else r.reward for r in flatten(groups)]
    reward = ranks.all_gather(reward)
    table = torch.tensor(reward).view(-1, samples)  # (P, G)
    first = ranks.offset(len(groups))
    return table, slice(first, first + len(groups))


# ---- packs

def by_prompt(rollouts):
    """Splits the list into runs of rollouts that share a prompt."""
    runs = itertools.groupby(rollouts, key=lambda r: r.prompt)
    return [list(run) for _, run in runs]


def fill_packs(rollouts, budget):
    """First-fit bin packing: lists of rollouts of at most `budget` tokens. A longer one goes alone.

    The rollouts of a prompt are placed one after the other, the longest first: most of them share a
    pack, which runs their prompt once. For the budget, a prompt counts once per rollout.
    """
    packs = []
    free = []  # tokens that are left in each pack
    groups = by_prompt(rollouts)
    groups.sort(key=lambda group: sum(map(len, group)), reverse=True)
    for group in groups:
        group.sort(key=len, reverse=True)
        for r in group:
            fits = (i for i, tokens in enumerate(free) if tokens >= len(r))
            i = next(fits, len(packs))
            if i == len(packs):
                packs.append([])
                free.append(budget)
            packs[i].append(r)
            free[i] -= len(r)
    # neighbours of one length may share a call of attend_in_groups
    return [sorted(members, key=len, reverse=True) for members in packs]


def fill_rows(rollouts, budget):
    """Lists of rollouts of similar length: B rows of the longest one's L tokens, with B * L at most
    `budget`. A longer rollout goes alone. No row is filled to less than SIMILAR."""
    lists = []
    longest = 0
    for r in sorted(rollouts, key=len, reverse=True):
        fits = lists and (len(lists[-1]) + 1) * longest <= budget
        if fits and len(r) >= SIMILAR * longest:
            lists[-1].append(r)
        else:
            lists.append([r])
            longest = len(r)
    return lists


def pack_evenly(rollouts, budget, layout="packed"):
    """fill_packs() or fill_rows(), with the same number of lists on every rank.

    The number is the same because each backward pass is collective. A rank with fewer lists adds a
    rollout of two tokens and weight 0. One token would not do, because torch.compile compiles a
    size of 1 apart. Collective."""
    fill = fill_rows if layout == "rows" else fill_packs
    lists = fill(rollouts, budget)
    names = set()
    for r in rollouts:
        names |= r.extra.keys()
    counts = ranks.all_gather([len(lists)])
    names = set(ranks.all_gather(list(names)))
    extra = {name: [0.0, 0.0] for name in names}
    filler = Rollout([0], [0, 0], "", False, [0.0, 0.0], extra=extra)
    missing = max(counts) - len(lists)
    return lists + [[filler]] * missing


# ---- a pack as tensors

def tensor_of(values, device, dtype=None):
    """A tensor of numbers: int64 or int32, or PyTorch's default dtype. NumPy reads a list faster
    than torch.tensor."""
    kind = np.int64 if dtype else np.float64
    array = np.fromiter(values, kind)
    dtype = dtype or torch.get_default_dtype()
    return torch.from_numpy(array).to(device, dtype)


def sampled_values(rollouts, name):
    """The values of one list of each rollout, such as its advantages, at the sampled tokens."""
    for r in rollouts:
        values = r.extra[name] if name in r.extra else getattr(r, name)
        yield from itertools.compress(values, r.loss_mask)


def collate(rollouts, device=None, layout="packed"):
    """A list of B rollouts -> a pack: tensors of the model's input and of the R sampled tokens.

    predictors (R,) are the positions, in the flattened input, whose output predicts the sampled
    tokens. Other completion tokens (a tool's output) are only read, like a prompt. old and ref are
    left to store_fixed_logps. extra has a tensor (R,) per name in the extra of the rollouts, which
    all have the same names. layout: see packed_input and padded_input, which have the rest.
    """
    if device is None:
        device = ranks.device()

    def numbers(name):
        return tensor_of(sampled_values(rollouts, name), device)

    weights = []
    sequence_ids = []
    for i, r in enumerate(rollouts):
        weights += [r.weight] * r.length
        sequence_ids += [i] * r.length
    make_input = padded_input if layout == "rows" else packed_input
    return SimpleNamespace(
        rollouts=rollouts,
        layout=layout,
        **make_input(rollouts, device),
        targets=tensor_of(sampled_values(rollouts, "completion"), device, torch.int64),  # (R,)
        vllm_logps=numbers("vllm_logps"),  # (R,)
        advantage=numbers("advantages"),  # (R,)
        extra={name: numbers(name) for name in rollouts[0].extra},  # (R,) each
        weight=tensor_of(weights, device),  # (R,)
        sequence_ids=tensor_of(sequence_ids, device, torch.int64),  # (R,)
        lengths=tensor_of([r.length for r in rollouts], device, torch.int64),  # (B,)
        max_seqlen=max(map(len, rollouts)),
        old=None,
        ref=None)


def packed_input(rollouts, device):
    """One row of T tokens: each prompt once, before its first completion. A dict of tensors.

    A prompt X with completions a and b becomes the row X a b. Attention runs per sequence: queries
    X a with keys X a, then queries b with keys X b. The causal mask is aligned to the end: b sees
    all of X. Sequence i has the queries cu_seqlens_q[i]:cu_seqlens_q[i+1] of the row and the keys
    kv_index[cu_seqlens_k[i]:cu_seqlens_k[i+1]]; kv_index (K,) has positions in the row.

    >>> a, b = (Rollout([5, 6], c, "", False, [0.0] * len(c)) for c in ([7, 8], [9]))
    >>> x = {name: tensor.tolist() for name, tensor in packed_input([a, b], "cpu").items()}
    >>> x["input_ids"], x["position_ids"]
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 3, 2]])
    >>> x["cu_seqlens_q"], x["kv_index"], x["predictors"]
    ([0, 4, 5], [0, 1, 2, 3, 0, 1, 4], [1, 2, 1])
    """
    input_ids = []
    position_ids = []
    kv_index = []
    predictors = []
    cu_seqlens_q = [0]
    cu_seqlens_k = [0]
    prompt_at = {}  # prompt -> its positions in the row
    for r in rollouts:
        prompt = tuple(r.prompt)
        start = len(input_ids)
        if prompt not in prompt_at:  # the first completion of a prompt stores it
            input_ids += prompt
            position_ids += range(len(prompt))
            prompt_at[prompt] = range(start, len(input_ids))
        start = len(input_ids)
        input_ids += r.completion
        completion_at = range(start, len(input_ids))
        position_ids += range(len(prompt), len(r))
        sequence_at = [*prompt_at[prompt], *completion_at]  # its positions in the row
        kv_index += sequence_at
        cu_seqlens_q.append(len(input_ids))
        cu_seqlens_k.append(len(kv_index))
        before = sequence_at[len(prompt) - 1:-1]  # the position before each completion token
        predictors += itertools.compress(before, r.loss_mask)

    def integers(values, dtype=torch.int64):
        return tensor_of(values, device, dtype)

    return {
        "input_ids": integers(input_ids)[None],  # (1, T)
        "position_ids": integers(position_ids)[None],  # (1, T)
        "kv_index": integers(kv_index),  # (K,)
        "cu_seqlens_q": integers(cu_seqlens_q, torch.int32),  # (B+1,)
        "cu_seqlens_k": integers(cu_seqlens_k, torch.int32),  # (B+1,)
        "predictors": integers(predictors),  # (R,)
    }


def padded_input(rollouts, device):
    """B rows of L tokens, each a prompt and its completion, padded on the right. A dict of tensors.

    >>> a, b = (Rollout([5, 6], c, "", False, [0.0] * len(c)) for c in ([7, 8], [9]))
    >>> x = padded_input([a, b], "cpu")
    >>> x["input_ids"].tolist(), x["predictors"].tolist()
    ([[5, 6, 7, 8], [5, 6, 9, 0]], [1, 2, 5])
    """
    length = max(map(len, rollouts))  # L
    input_ids = []
    predictors = []
    for r in rollouts:
        start = len(input_ids) + len(r.prompt) - 1  # the position before the first completion token
        before = range(start, start + len(r.completion))
        predictors += itertools.compress(before, r.loss_mask)
        input_ids += r.prompt
        input_ids += r.completion
        input_ids += [0] * (length - len(r))  # any token: no output of these positions is used
    return {
        "input_ids": tensor_of(input_ids, device, torch.int64).view(-1, length),  # (B, L)
        "predictors": tensor_of(predictors, device, torch.int64),  # (R,)
    }


def sequence_sum(x, pack):
    """(R,) -> (B,): the sum over each sequence."""
    return x.new_zeros(len(pack.lengths)).index_add(0, pack.sequence_ids, x)  # (B,)


def sequence_mean(x, pack):
    """(R,) -> (R,): each token gets the mean over its sequence."""
    return (sequence_sum(x, pack) / pack.lengths)[pack.sequence_ids]  # (R,)


# ---- attention

def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                     pack=None, **kwargs):
    """Causal attention inside each sequence of a pack. Registered with transformers as "packed".

    query (1, heads, T, d), key and value (1, kv heads, T, d) -> (1, T, heads, d), None. `pack` is
    what collate returns. There is no T x T mask: the cost is the sum over the sequences.

    Raises RunError for a mask of the model's own, a sliding window shorter than a sequence,
    attention sinks and soft caps."""
    unsupported = [attention_mask, kwargs.get("s_aux"), kwargs.get("softcap")]
    window = kwargs.get("sliding_window") or pack.max_seqlen
    if window < pack.max_seqlen or any(x is not None for x in unsupported):
        raise RunError("this model is not supported: its attention has a mask of its own, a window "
                       "shorter than --max_prompt + --max_tokens, sinks or a soft cap")
    q = query[0].transpose(0, 1)  # (T, heads, d)
    k, v = with_shared_prompts(key, value, pack)  # (K, kv heads, d), (K, kv heads, d)
    if q.is_cuda and q.dtype is not torch.float32:
        out = flash_attention(q, k, v, pack, scaling)  # (T, heads, d)
    else:
        out = attend_in_groups(q, k, v, pack, scaling)  # (T, heads, d)
    return out[None], None  # (1, T, heads, d)


def with_shared_prompts(key, value, pack):
    """(1, kv heads, T, d) twice -> (K, kv heads, d) twice: the keys and the values of each
    sequence, with its prompt that other sequences share. One embedding look-up for both, because
    its backward pass sums the gradients of a token in fp32 and rounds once."""
    heads = [x[0].transpose(0, 1) for x in (key, value)]  # (T, kv heads, d) twice
    both = torch.cat(heads, dim=1)  # (T, 2 * kv heads, d)
    rows = F.embedding(pack.kv_index, both.flatten(1))  # (K, 2 * kv heads * d)
    return rows.unflatten(1, both.shape[1:]).chunk(2, dim=1)  # (K, kv heads, d) twice


def flash_attention(q, k, v, pack, scaling):
    """One kernel for all sequences; window_size makes it causal, aligned to the last key.
    q (T, heads, d), k and v (K, kv heads, d) -> (T, heads, d)."""
    from torch.nn.attention.varlen import varlen_attn  # late: the import takes a second
    return varlen_attn(
        q, k, v, pack.cu_seqlens_q, pack.cu_seqlens_k, pack.max_seqlen, pack.max_seqlen,
        scale=scaling, window_size=(-1, 0), enable_gqa=True)  # (T, heads, d)


def attend_in_groups(q, k, v, pack, scaling):
    """The same with PyTorch's dense attention: one call per run of sequences with equal lengths."""
    shared = q.shape[1] // k.shape[1]  # query heads per key head
    k = k.repeat_interleave(shared, dim=1)  # (K, heads, d)
    v = v.repeat_interleave(shared, dim=1)  # (K, heads, d)
    lengths = zip(pack.cu_seqlens_q.diff().tolist(), pack.cu_seqlens_k.diff().tolist())
    # sequences of m queries and n keys, b times in a row
    runs = [(m, n, len(list(run))) for (m, n), run in itertools.groupby(lengths)]
    # split(), not slices: the backward pass of a slice fills a tensor of full size with zeros
    queries = q.split([b * m for m, n, b in runs])
    keys = k.split([b * n for m, n, b in runs])
    values = v.split([b * n for m, n, b in runs])
    out = []
    for (m, n, b), *parts in zip(runs, queries, keys, values):
        # (b, heads, m, d), then (b, heads, n, d) twice
        parts = [x.unflatten(0, (b, -1)) for x in parts]
        q_run, k_run, v_run = (x.transpose(1, 2) for x in parts)
        mask = None
        if m < n:  # a prompt stored earlier: these m queries are the last m of n positions
            mask = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)  # (m, n)
        out_run = F.scaled_dot_product_attention(
            q_run, k_run, v_run, mask, is_causal=m == n, scale=scaling)  # (b, heads, m, d)
        out.append(out_run.transpose(1, 2).flatten(0, 1))  # (b * m, heads, d)
    return torch.cat(out)  # (T, heads, d)
