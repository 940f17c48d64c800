"""Log-probs of target tokens straight from hidden states: the (R, V) matrix of logits never exists."""
import torch
import torch.nn.functional as F

CHUNK = 2048  # vocabulary tokens per chunk: 8 KiB of fp32 logits per row


class HeadLogps(torch.autograd.Function):
    """The LM head and log_softmax in one operation that works on one chunk of the vocabulary at a time.

    apply(hidden (R, H), weight (V, H), targets (R,), temperature, chunk) -> logp (R,), entropy (R,) in fp32:

        logp[i] = log_softmax(hidden[i] @ weight.T / temperature)[targets[i]]

    The entropy is a metric and has no gradient. At most two fp32 arrays of (R, chunk) exist at a time. The
    forward pass keeps log sum exp(logits) and the entropy of each chunk, and combines them at the end. The
    backward pass computes the logits again and turns them, in place, into softmax(logits) and then into their
    gradient: grad_logits = grad_logp * (onehot(target) - softmax(logits)).
    """

    @staticmethod
    def chunk_logits(hidden, weight, targets, temperature):
        """-> logits (R, C) of one chunk, column of the target (R, 1), is the target in this chunk (R, 1)."""
        logits = F.linear(hidden, weight).float()  # (R, C)
        if temperature != 1:  # every pass over the logits costs time
            logits.div_(temperature)
        column = targets[:, None].clamp(0, len(weight) - 1)  # (R, 1)
        return logits, column, column == targets[:, None]

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk):
        target_logits, norms, entropies = 0, [], []
        for start in range(0, len(weight), chunk):
            logits, column, in_chunk = HeadLogps.chunk_logits(
                hidden, weight[start:start + chunk], targets - start, temperature)
            logp = logits.log_softmax(-1)  # (R, C) as if this chunk were the whole vocabulary
            norms.append(logits.amax(-1) - logp.amax(-1))  # (R,) log sum exp(logits), as logp = logits - it
            target_logits += logits.gather(-1, column) * in_chunk  # (R, 1)
            p = torch.exp(logp, out=logits)  # (R, C) reuses the memory of the logits
            entropies.append(-logp.mul_(p).sum(-1))  # (R,)
            del logits, logp, p  # free them before the next chunk is computed
        norms, entropies = torch.stack(norms, -1), torch.stack(entropies, -1)  # (R, chunks), (R, chunks)
        norm = norms.logsumexp(-1, keepdim=True)  # (R, 1) log sum exp over the whole vocabulary
        chunk_logp = norms - norm  # (R, chunks) log-prob that the token is in this chunk
        # chain rule: entropy between the chunks plus the mean entropy within them
        entropy = (chunk_logp.exp() * (entropies - chunk_logp)).sum(-1)  # (R,)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.save_for_backward(hidden, weight, targets, norm)
        ctx.mark_non_differentiable(entropy)
        return (target_logits - norm)[:, 0], entropy  # (R,), (R,)

    @staticmethod
    def backward(ctx, grad_logp, _):
        hidden, weight, targets, norm = ctx.saved_tensors  # (R, H), (V, H), (R,), (R, 1)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)  # (R, H) summed over the chunks in fp32
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # (V, H)
        grad = grad_logp[:, None] / ctx.temperature  # (R, 1)
        for start in range(0, len(weight), ctx.chunk):
            w = weight[start:start + ctx.chunk]  # (C, H)
            logits, column, in_chunk = HeadLogps.chunk_logits(hidden, w, targets - start, ctx.temperature)
            p = logits.sub_(norm).exp_()  # (R, C)
            grad_logits = p.mul_(-grad).scatter_add_(-1, column, grad * in_chunk).to(w.dtype)  # (R, C)
            grad_hidden += grad_logits @ w  # (R, H)
            if grad_weight is not None:
                torch.mm(grad_logits.T, hidden, out=grad_weight[start:start + ctx.chunk])  # (C, H)
            del logits, p, grad_logits
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None
