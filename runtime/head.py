"""Log-probs straight from hidden states: the (R, V) matrix of logits never exists."""
import functools

import torch
import torch.nn.functional as F

COMPILED = 4  # times as many vocabulary tokens at a time: compiled, no array of fp32 is stored


@functools.cache
def compiled(function):
    """torch.compile of a function, for any shapes; made at its first call."""
    return torch.compile(function, dynamic=True)


def chunk_logits(hidden, weight, targets, temperature, cap):
    """-> logits (R, C) of one chunk, column of the target (R, 1), is it in this chunk (R, 1)."""
    logits = F.linear(hidden, weight).float()  # (R, C)
    if temperature != 1:  # every pass over the logits costs time
        logits.div_(temperature)
    if cap:  # Gemma 2's soft cap: no logit is beyond it
        logits.div_(cap).tanh_().mul_(cap)
    targets = targets[:, None]  # (R, 1)
    column = targets.clamp(0, len(weight) - 1)  # (R, 1)
    return logits, column, column == targets


def chunk_forward(hidden, weight, targets, temperature, cap):
    """-> of a chunk: log sum exp of logits (R,), entropy (R,), the target's logit or 0 (R, 1)."""
    logits, column, in_chunk = chunk_logits(hidden, weight, targets, temperature, cap)
    logp = logits.log_softmax(-1)  # (R, C) as if this chunk were the whole vocabulary
    norm = logits.amax(-1) - logp.amax(-1)  # (R,) log sum exp(logits): logp = logits - norm
    target_logit = logits.gather(-1, column) * in_chunk  # (R, 1)
    p = torch.exp(logp, out=logits)  # (R, C) reuses the memory of the logits
    entropy = -logp.mul_(p).sum(-1)  # (R,)
    return norm, entropy, target_logit


def chunk_backward(hidden, weight, targets, temperature, cap, norm, grad, entropy, grad_entropy):
    """-> gradient of hidden @ weight.T for one chunk (R, C). norm, grad, entropy, grad_entropy:
    (R, 1). grad is d loss / d logp, grad_entropy d loss / d entropy, both divided by the
    temperature; grad_entropy is None if the loss does not use the entropy."""
    logits, column, in_chunk = chunk_logits(hidden, weight, targets, temperature, cap)
    if cap:
        slope = 1 - (logits / cap) ** 2  # (R, C) derivative of cap * tanh(x / cap)
    logp = logits.sub_(norm)  # (R, C)
    factor = grad  # (R, 1)
    if grad_entropy is not None:
        factor = (logp + entropy).mul_(grad_entropy).add_(grad)  # (R, C)
    p = logp.exp_()  # (R, C)
    grad_logits = p.mul_(factor).neg_()  # (R, C) -p * factor
    if torch.compiler.is_compiling():  # scatter_add would store it in fp32
        columns = torch.arange(len(weight), device=column.device)  # (C,)
        is_target = (columns == column) & in_chunk  # (R, C)
        grad_logits += torch.where(is_target, grad, 0.0)  # (R, C)
    else:
        grad_logits.scatter_add_(-1, column, grad * in_chunk)  # (R, C)
    if cap:
        grad_logits *= slope  # (R, C)
    return grad_logits.to(weight.dtype)


class HeadLogps(torch.autograd.Function):
    """The LM head and log_softmax as one operation, on one chunk of the vocabulary at a time.

    apply(hidden (R, H), weight (V, H), targets (R,), temperature, chunk, compiles=False, cap=None)
    -> logp (R,), entropy (R,) in fp32:

        logp[i] = log_softmax(hidden[i] @ weight.T / temperature)[targets[i]]

    cap: the logits x become cap * tanh(x / cap) before the softmax. At most two fp32 arrays of
    (R, chunk) exist at a time, three with a cap. compiles: torch.compile fuses the passes over a
    chunk, which is larger then. The forward pass combines log sum exp(logits) and entropy of the
    chunks at the end. The backward pass computes the logits again, and from them, in place, with
    p = softmax(logits),
    grad_logits = grad_logp * (onehot(target) - p) - grad_entropy * p * (log p + entropy).
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk, compiles=False, cap=None):
        run_chunk = chunk_forward
        if compiles:
            run_chunk = compiled(chunk_forward)
            chunk *= COMPILED
        norms = []
        entropies = []
        target_logit = 0
        for i in range(0, len(weight), chunk):
            w = weight[i:i + chunk]  # (C, H)
            norm, entropy, logit = run_chunk(hidden, w, targets - i, temperature, cap)
            norms.append(norm)
            entropies.append(entropy)
            target_logit = target_logit + logit  # (R, 1) in one of the chunks it is not 0
        norms = torch.stack(norms, -1)  # (R, chunks)
        entropies = torch.stack(entropies, -1)  # (R, chunks)
        norm = norms.logsumexp(-1, keepdim=True)  # (R, 1) log sum exp over the whole vocabulary
        chunk_logp = norms - norm  # (R, chunks) log-prob that the token is in this chunk
        # chain rule: entropy between the chunks plus the mean entropy within them
        entropy = (chunk_logp.exp() * (entropies - chunk_logp)).sum(-1)  # (R,)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.compiles = compiles
        ctx.cap = cap
        ctx.save_for_backward(hidden, weight, targets, norm, entropy[:, None])
        ctx.set_materialize_grads(False)  # of what the loss does not use, the gradient is None
        return (target_logit - norm)[:, 0], entropy  # (R,), (R,)

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        # (R, H), (V, H), (R,), (R, 1), (R, 1)
        hidden, weight, targets, norm, entropy = ctx.saved_tensors
        if grad_logp is None:  # a loss of the entropy alone
            grad_logp = torch.zeros_like(grad_entropy)  # (R,)
        grad = grad_logp[:, None] / ctx.temperature  # (R, 1)
        if grad_entropy is not None:
            grad_entropy = grad_entropy[:, None] / ctx.temperature  # (R, 1)
        run_chunk = compiled(chunk_backward) if ctx.compiles else chunk_backward
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)  # (R, H) sum of chunks in fp32
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # (V, H)
        for i in range(0, len(weight), ctx.chunk):
            rows = slice(i, i + ctx.chunk)  # of this chunk
            w = weight[rows]  # (C, H)
            grad_logits = run_chunk(
                hidden, w, targets - i, ctx.temperature, ctx.cap, norm, grad, entropy,
                grad_entropy)
            grad_hidden += grad_logits @ w  # (R, H)
            if grad_weight is not None:
                torch.mm(grad_logits.T, hidden, out=grad_weight[rows])  # (C, H)
            del grad_logits  # (R, C) before the next chunk is computed
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None
