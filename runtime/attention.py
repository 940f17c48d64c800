"""Attention over a pack: several sequences in one row, each prompt stored once for all its completions."""
import inspect
import itertools

import torch
import torch.nn.functional as F


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, batch=None,
                     **kwargs):
    """Causal attention inside each sequence of a pack. Registered with transformers as "packed".

    query (1, heads, T, d), key and value (1, kv heads, T, d) -> (1, T, heads, d), None. `batch` is what
    nano_rlvr.collate returns; its docstring says which queries and keys a sequence has. There is no T x T
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
