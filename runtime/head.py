"""Log-probs of target tokens straight from hidden states: the (R, V) matrix of logits never exists."""
import functools

import torch
import torch.nn.functional as F

CHUNK = 2048  # vocabulary tokens per chunk: 8 KiB of fp32 logits per row


def chunk_logits(hidden, weight, targets, temperature):
    """-> logits (R, C) of one chunk, column of the target (R, 1), is the target in this chunk (R, 1)."""
    logits = F.linear(hidden, weight).float()  # (R, C)
    if temperature != 1:  # every pass over the logits costs time
        logits.div_(temperature)
    column = targets[:, None].clamp(0, len(weight) - 1)  # (R, 1)
    return logits, column, column == targets[:, None]


def chunk_forward(hidden, weight, targets, temperature):
    """-> log sum exp of the logits of one chunk (R,), their entropy (R,), the target's logit or 0 (R, 1)."""
    logits, column, in_chunk = chunk_logits(hidden, weight, targets, temperature)
    logp = logits.log_softmax(-1)  # (R, C) as if this chunk were the whole vocabulary
    norm = logits.amax(-1) - logp.amax(-1)  # (R,) log sum exp(logits), as logp = logits - it
    target_logit = logits.gather(-1, column) * in_chunk  # (R, 1)
    p = torch.exp(logp, out=logits)  # (R, C) reuses the memory of the logits
    return norm, -logp.mul_(p).sum(-1), target_logit


def chunk_backward(hidden, weight, targets, temperature, norm, grad):
    """-> gradient of the logits of one chunk (R, C), before the division by the temperature.

    norm (R, 1): log sum exp over the whole vocabulary. grad (R, 1): that of logp, divided by the temperature.
    """
    logits, column, in_chunk = chunk_logits(hidden, weight, targets, temperature)
    p = logits.sub_(norm).exp_()  # (R, C)
    return p.mul_(-grad).scatter_add_(-1, column, grad * in_chunk).to(weight.dtype)  # (R, C)



@functools.cache
def fused(function):
    """The function compiled by torch.compile, for any lengths: its element-wise steps become a few passes."""
    return torch.compile(function, dynamic=True)


class HeadLogps(torch.autograd.Function):
    """The LM head and log_softmax in one operation that works on one chunk of the vocabulary at a time.

    apply(hidden (R, H), weight (V, H), targets (R,), temperature, chunk) -> logp (R,), entropy (R,) in fp32:

        logp[i] = log_softmax(hidden[i] @ weight.T / temperature)[targets[i]]

    The entropy is a metric and has no gradient. At most two fp32 arrays of (R, chunk) exist at a time. The
    forward pass keeps log sum exp(logits) and the entropy of each chunk, and combines them at the end. The
    backward pass computes the logits again and turns them, in place, into softmax(logits) and then into their
    gradient: grad_logits = grad_logp * (onehot(target) - softmax(logits)). With a sixth argument True, the
    work on a chunk is compiled.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk, fuse=False):
        run = fused(chunk_forward) if fuse else chunk_forward
        starts = range(0, len(weight), chunk)
        norms, entropies, target_logits = zip(*(
            run(hidden, weight[i:i + chunk], targets - i, temperature) for i in starts))
        norms, entropies = torch.stack(norms, -1), torch.stack(entropies, -1)  # (R, chunks), (R, chunks)
        norm = norms.logsumexp(-1, keepdim=True)  # (R, 1) log sum exp over the whole vocabulary
        chunk_logp = norms - norm  # (R, chunks) log-prob that the token is in this chunk
        # chain rule: entropy between the chunks plus the mean entropy within them
        entropy = (chunk_logp.exp() * (entropies - chunk_logp)).sum(-1)  # (R,)
        ctx.temperature, ctx.chunk, ctx.fuse = temperature, chunk, fuse
        ctx.save_for_backward(hidden, weight, targets, norm)
        ctx.mark_non_differentiable(entropy)
        return (sum(target_logits) - norm)[:, 0], entropy  # (R,), (R,)

    @staticmethod
    def backward(ctx, grad_logp, _):
        run = fused(chunk_backward) if ctx.fuse else chunk_backward
        hidden, weight, targets, norm = ctx.saved_tensors  # (R, H), (V, H), (R,), (R, 1)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)  # (R, H) summed over the chunks in fp32
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # (V, H)
        grad = grad_logp[:, None] / ctx.temperature  # (R, 1)
        for i in range(0, len(weight), ctx.chunk):
            w = weight[i:i + ctx.chunk]  # (C, H)
            grad_logits = run(hidden, w, targets - i, ctx.temperature, norm, grad)  # (R, C)
            grad_hidden += grad_logits @ w  # (R, H)
            if grad_weight is not None:
                torch.mm(grad_logits.T, hidden, out=grad_weight[i:i + ctx.chunk])  # (C, H)
            del grad_logits  # before the next chunk is computed
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None
