"""Step 2: step 1 + several completions to each question, each compared with the others.

    python -m learn.ladder.2_group [seed]

The model answers sums. A right answer has reward 1, a wrong one 0. The gradient of

    loss = -(mean over all tokens of  advantage * log p(token))
    advantage = (reward - mean of its group) / (standard deviation of its group + 1e-4)

makes the tokens of completions that are better than their group more probable, and the others less.
The advantage is GRPO's (arXiv:2402.03300). GRPO takes the mean of each completion first; the mean
over all tokens is DAPO's (arXiv:2503.14476). A group has the completions to one question. Divided
by the deviation, advantages have the same size for rewards of any scale. 1e-4 keeps a group of
equal rewards, whose deviation is 0, at advantage 0.

Shapes: N completions, P tokens of the longest prompt, C of the longest completion, V vocabulary.
"""
import sys

import torch
from transformers import AutoModelForCausalLM

from learn.ladder import ladder
from learn.ladder.ladder import MODEL, timed

STEPS = 20
PROMPTS = 16  # per step
SAMPLES = 8  # completions to each prompt: a group
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
    # A completion ends with its first end token, which is trained too. What follows is padding.
    ends = (completions == tokenizer.eos_token_id).long()  # (N, C)
    mask = (ends.cumsum(1) - ends == 0).long()  # (N, C) 1: a token of the completion, 0: padding
    batch = {"ids": ids, "attention": torch.cat([attention, mask], 1), "mask": mask}
    return batch, tokenizer.batch_decode(completions, skip_special_tokens=True)


def advantages(reward):
    """(N,) -> (N,). A group's completions are neighbours. Equal rewards give zeros."""
    groups = reward.view(-1, SAMPLES)  # (N / SAMPLES, SAMPLES)
    mean = groups.mean(1, keepdim=True)  # (N / SAMPLES, 1)
    std = groups.std(1, keepdim=True, correction=0)  # (N / SAMPLES, 1)
    return ((groups - mean) / (std + 1e-4)).flatten()  # (N,)


def log_probs(model, batch):
    """log p of each token of the completions: (N, C)."""
    positions = (batch["attention"].cumsum(1) - 1).clamp(min=0)  # (N, P + C) prompts begin at 0
    logits = model(batch["ids"], attention_mask=batch["attention"], position_ids=positions).logits
    C = batch["mask"].shape[1]
    # The output at a position predicts the token at the next position.
    logp = logits[:, -C - 1:-1].log_softmax(-1)  # (N, C, V)
    return logp.gather(2, batch["ids"][:, -C:, None])[:, :, 0]  # (N, C)


def policy_loss(logp, advantage, mask):
    """logp (N, C), advantage (N,), mask (N, C) -> (). The mean over all tokens, without padding."""
    token_loss = -advantage[:, None] * logp  # (N, C)
    return (mask * token_loss).sum() / mask.sum()


def update(model, optimizer, batch, reward):
    """One optimizer step."""
    loss = policy_loss(log_probs(model, batch), advantages(reward), batch["mask"])
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
        examples = [example for example in examples for _ in range(SAMPLES)]
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
