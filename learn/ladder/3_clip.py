"""Step 3: step 2 + several optimizer steps on each batch of completions.

    python -m learn.ladder.3_clip [seed]

After the first optimizer step, the model is no longer the one that sampled the completions.

    ratio = p(token) / p_old(token)        p_old: before the first of these optimizer steps
    loss = mean over all tokens of  -min(ratio * advantage, clip(ratio) * advantage) + KL_COEF * k3

Old samples, weighted with p / p_old, give on average what new samples would. With one ratio per
token this is only nearly so, while the two models are near each other. The gradient of ratio *
advantage is ratio * advantage * grad log p; at ratio 1, it is that of step 2. min() stops a token
(gradient 0) that has moved far enough in the direction of its advantage (PPO, arXiv:1707.06347):

    advantage > 0:  stopped above 1 + CLIP, never below 1 - CLIP
    advantage < 0:  stopped below 1 - CLIP, never above 1 + CLIP

k3 = exp(d) - d - 1, with d = log p_ref - log p, estimates the KL divergence to the reference, the
frozen model of the start (arXiv:2402.03300). Its mean is the KL if the tokens come from p. After
the first optimizer step they come from p_old, so it is slightly off. In the loss, it holds the
model near its start.

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
MINIBATCHES = 4  # optimizer steps per batch of completions
CLIP = 0.2
KL_COEF = 0.01
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


def policy_loss(logp, batch):
    """logp (N, C) -> (). The mean over all tokens, without padding."""
    ratio = (logp - batch["old"]).exp()  # (N, C)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)  # (N, C)
    token_loss = -torch.minimum(ratio * batch["advantage"], clipped * batch["advantage"])  # (N, C)
    d = batch["ref"] - logp  # (N, C)
    token_loss = token_loss + KL_COEF * (d.exp() - d - 1)  # (N, C)
    return (batch["mask"] * token_loss).sum() / batch["mask"].sum()


def update(model, ref, optimizer, batch, reward):
    """MINIBATCHES optimizer steps."""
    batch["advantage"] = advantages(reward)[:, None]  # (N, 1)
    with torch.no_grad():
        batch["old"] = log_probs(model, batch)  # (N, C)
        batch["ref"] = log_probs(ref, batch)  # (N, C)
    parts = torch.randperm(len(reward)).chunk(MINIBATCHES)
    minibatches = [{name: x[rows] for name, x in batch.items()} for rows in parts]
    for minibatch in minibatches:
        loss = policy_loss(log_probs(model, minibatch), minibatch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train(seed=0):
    torch.manual_seed(seed)
    tokenizer, train_set, test_set = ladder.questions(seed)
    model, ref = (AutoModelForCausalLM.from_pretrained(MODEL) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    rewards, seconds = [], {}
    for step in range(STEPS):
        examples = train_set[step * PROMPTS:(step + 1) * PROMPTS]
        examples = [example for example in examples for _ in range(SAMPLES)]
        with timed(seconds, "sampling"):
            batch, texts = sample(model, tokenizer, examples)
        reward = torch.tensor(ladder.score(texts, examples))  # (N,)
        with timed(seconds, "updating"):
            update(model, ref, optimizer, batch, reward)
        rewards.append(reward.mean().item())
        print(f"step {step:2}  reward {rewards[-1]:.3f}", flush=True)
    _, texts = sample(model, tokenizer, test_set, greedy=True)
    ladder.report(__file__, seed, rewards, len(reward), seconds, texts, test_set)


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
