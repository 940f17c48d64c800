"""Step 1: REINFORCE.

    python -m learn.ladder.1_reinforce [seed]

The model, here called the policy, answers sums. A right answer o has reward r(o) = 1, a wrong one
0. We want a larger mean reward J = sum over o of p(o) * r(o). As grad p = p * grad log p,

    grad J = sum over o of  p(o) * r(o) * grad log p(o) = mean over samples of  r * grad log p

and log p(o) is the sum of log p(token) over its tokens. So we sample, and follow the gradient of

    loss = -(mean over all tokens of  reward * log p(token))

which makes the tokens of right completions more probable (REINFORCE, Williams 1992). It divides by
the number of tokens and not of samples, which changes the size of the step. The mean of grad log p
is 0, because the p(o) sum to 1. So a number that is added to all rewards adds noise, but leaves the
mean of the gradient nearly as it is (exactly, if the loss were divided by a constant).

Shapes: N completions, P tokens of the longest prompt, C of the longest completion, V vocabulary.
"""
import sys

import torch
from transformers import AutoModelForCausalLM

from learn.ladder import ladder
from learn.ladder.ladder import MODEL, timed

STEPS = 20
PROMPTS = 128  # per step
MAX_TOKENS = 96  # of a completion
LR = 1e-4


def sample(model, tokenizer, examples, greedy=False):
    """A completion to each of N questions. -> (batch of tensors, N texts)."""
    prompts = [example["prompt_ids"] for example in examples]
    P = max(map(len, prompts))
    # Prompts are padded on the left, so that all completions begin in the same column.
    ids = [[tokenizer.pad_token_id] * (P - len(p)) + p for p in prompts]
    attention = [[0] * (P - len(p)) + [1] * len(p) for p in prompts]
    ids, attention = torch.tensor(ids), torch.tensor(attention)  # (N, P), (N, P)
    # Without top_k=0, transformers would sample from the 50 most probable tokens only.
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    ids = model.generate(
        ids, attention_mask=attention, max_new_tokens=MAX_TOKENS, **how)  # (N, P + C)
    completions = ids[:, P:]  # (N, C)
    # A completion ends with its first end token, which is trained too. What follows is padding:
    # ends 0 0 1 1 -> mask 1 1 1 0
    ends = (completions == tokenizer.eos_token_id).long()  # (N, C)
    mask = (ends.cumsum(1) - ends == 0).long()  # (N, C) 1: a token of the completion, 0: padding
    batch = {"ids": ids, "attention": torch.cat([attention, mask], 1), "mask": mask}
    return batch, tokenizer.batch_decode(completions, skip_special_tokens=True)


def log_probs(model, batch):
    """log p of each token of the completions: (N, C)."""
    positions = (batch["attention"].cumsum(1) - 1).clamp(min=0)  # (N, P + C) prompts begin at 0
    logits = model(batch["ids"], attention_mask=batch["attention"], position_ids=positions).logits
    C = batch["mask"].shape[1]
    # The output at a position predicts the token at the next position.
    logp = logits[:, -C - 1:-1].log_softmax(-1)  # (N, C, V)
    return logp.gather(2, batch["ids"][:, -C:, None])[:, :, 0]  # (N, C)


def policy_loss(logp, reward, mask):
    """logp (N, C), reward (N,), mask (N, C) -> (). The mean over all tokens, without padding."""
    token_loss = -reward[:, None] * logp  # (N, C)
    return (mask * token_loss).sum() / mask.sum()


def update(model, optimizer, batch, reward):
    """One optimizer step."""
    loss = policy_loss(log_probs(model, batch), reward, batch["mask"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(seed=0):
    torch.manual_seed(seed)
    tokenizer, train_set, test_set = ladder.questions(seed)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    rewards, seconds = [], {}
    for step in range(STEPS):
        examples = train_set[step * PROMPTS:(step + 1) * PROMPTS]
        with timed(seconds, "sampling"):
            batch, texts = sample(model, tokenizer, examples)
        reward = torch.tensor(ladder.score(texts, examples))  # (N,)
        with timed(seconds, "updating"):
            update(model, optimizer, batch, reward)
        rewards.append(reward.mean().item())
        print(f"step {step:2}  reward {rewards[-1]:.3f}", flush=True)
    _, texts = sample(model, tokenizer, test_set, greedy=True)
    ladder.report(__file__, seed, rewards, len(reward), seconds, texts, test_set)


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
