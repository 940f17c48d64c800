"""Step 4: step 3 + the trainer has packs in place of padding, and one weight for all tokens.

    python -m learn.ladder.4_pack [seed]

A pack is one row in which sequences (a prompt and its completion) lie end to end, without padding.
An optimizer step has several packs. Each has a backward pass of its own, which needs less memory
than one for all, and the gradients add up.

    loss of a pack = sum over its tokens of  weight * token_loss
    weight = 1 / (number of completion tokens in all packs of the optimizer step), one number

So the packs together give the mean over all tokens of step 3, in whatever way they are split. A
mask of T x T keeps a token from seeing other sequences. `sample` pads as before.

Shapes: of a pack, T tokens, R of them in completions. N completions, V vocabulary.
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
PACK = 8  # sequences
MAX_TOKENS = 96  # of a completion
LR = 1e-4


def sample(model, tokenizer, examples, greedy=False):
    """A completion to each of N questions. -> (N pairs of prompt and completion, N texts)."""
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
    mask = ends.cumsum(1) - ends == 0  # (N, C) True: a token of the completion, False: padding
    sequences = [(prompt, row[kept].tolist())
                 for prompt, row, kept in zip(prompts, completions, mask)]
    return sequences, tokenizer.batch_decode(completions, skip_special_tokens=True)


def advantages(reward):
    """(N,) -> (N,). A group's completions are neighbours. Equal rewards give zeros."""
    groups = reward.view(-1, SAMPLES)  # (N / SAMPLES, SAMPLES)
    mean = groups.mean(1, keepdim=True)  # (N / SAMPLES, 1)
    std = groups.std(1, keepdim=True, correction=0)  # (N / SAMPLES, 1)
    return ((groups - mean) / (std + 1e-4)).flatten()  # (N,)


def collate(sequences, weight):
    """Sequences -> a pack: one row of T tokens."""
    ids, positions, owner, predictors, advantage = [], [], [], [], []
    for i, (prompt, completion, a) in enumerate(sequences):
        start = len(ids) + len(prompt)
        ids += prompt + completion
        predictors += range(start - 1, len(ids) - 1)  # a position predicts the next token
        positions += range(len(prompt + completion))  # prompts begin at 0
        owner += [i] * len(prompt + completion)
        advantage += [a] * len(completion)
    ids, owner, predictors = map(torch.tensor, (ids, owner, predictors))  # (T,), (T,), (R,)
    # A token sees itself and the earlier tokens of its own sequence.
    attention = (owner[:, None] == owner).tril()  # (T, T)
    return {"ids": ids[None], "positions": torch.tensor([positions]),  # (1, T), (1, T)
            "attention": attention[None, None], "predictors": predictors,  # (1, 1, T, T), (R,)
            "targets": ids[predictors + 1],  # (R,)
            "advantage": torch.tensor(advantage), "weight": weight}  # (R,), a number


def make_packs(sequences):
    """The packs of an optimizer step."""
    weight = 1 / sum(len(completion) for _, completion, _ in sequences)
    return [collate(sequences[i:i + PACK], weight) for i in range(0, len(sequences), PACK)]


def log_probs(model, pack):
    """log p of each token of the completions: (R,)."""
    logits = model(pack["ids"], attention_mask=pack["attention"], position_ids=pack["positions"],
                   logits_to_keep=pack["predictors"]).logits[0]  # (R, V) at R positions
    return logits.log_softmax(-1).gather(1, pack["targets"][:, None])[:, 0]  # (R,)


def policy_loss(logp, pack):
    """logp (R,) -> (). The pack's part of the mean over all tokens."""
    ratio = (logp - pack["old"]).exp()  # (R,)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)  # (R,)
    token_loss = -torch.minimum(ratio * pack["advantage"], clipped * pack["advantage"])  # (R,)
    d = pack["ref"] - logp  # (R,)
    token_loss = token_loss + KL_COEF * (d.exp() - d - 1)  # (R,)
    return (pack["weight"] * token_loss).sum()


def update(model, ref, optimizer, sequences, reward):
    """MINIBATCHES optimizer steps."""
    sequences = [(*s, a) for s, a in zip(sequences, advantages(reward).tolist())]
    parts = torch.randperm(len(reward)).chunk(MINIBATCHES)
    minibatches = [make_packs([sequences[i] for i in rows]) for rows in parts]
    with torch.no_grad():
        for pack in sum(minibatches, []):
            pack["old"] = log_probs(model, pack)  # (R,)
            pack["ref"] = log_probs(ref, pack)  # (R,)
    for packs in minibatches:
        optimizer.zero_grad()
        for pack in packs:
            policy_loss(log_probs(model, pack), pack).backward()  # the gradients add up
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
            sequences, texts = sample(model, tokenizer, examples)
        reward = torch.tensor(ladder.score(texts, examples))  # (N,)
        with timed(seconds, "updating"):
            update(model, ref, optimizer, sequences, reward)
        rewards.append(reward.mean().item())
        print(f"step {step:2}  reward {rewards[-1]:.3f}", flush=True)
    _, texts = sample(model, tokenizer, test_set, greedy=True)
    ladder.report(__file__, seed, rewards, len(reward), seconds, texts, test_set)


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
