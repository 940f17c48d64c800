"""Step 4: step 3 + packs in place of padding, and a weight for each token.

    python learn/ladder/4_pack.py [seed]

A pack is one row in which sequences (a prompt and its answer) lie end to end, without padding. The
answers of an optimizer step are in several packs. Each has a backward pass of its own, which needs
less memory than one for all, and the gradients add up.

    loss of a pack = sum over its tokens of  weight * token_loss
    weight = 1 / (number of answer tokens in all packs of the optimizer step)

So the packs together give the mean over all tokens of step 3, in whatever way they are split.

Shapes: of a pack, T tokens, R of them in answers. N answers, V vocabulary. Sampling still pads.
"""
import sys

import torch
from transformers import AutoModelForCausalLM

import ladder
from ladder import MODEL, timed

STEPS = 20
PROMPTS = 16  # per step
SAMPLES = 8  # answers to each prompt: a group
MINIBATCHES = 4  # optimizer steps per batch of answers
CLIP = 0.2
KL_COEF = 0.01
PACK = 8  # sequences
MAX_TOKENS = 96  # of an answer
LR = 1e-4


def sample(model, tokenizer, examples, greedy=False):
    """An answer to each of N questions. -> (N pairs of prompt and answer, N texts)."""
    prompts = [example["prompt_ids"] for example in examples]
    P = max(map(len, prompts))
    # Prompts are padded on the left, so that all answers begin in the same column.
    ids = [[tokenizer.pad_token_id] * (P - len(p)) + p for p in prompts]
    seen = [[0] * (P - len(p)) + [1] * len(p) for p in prompts]
    ids, seen = torch.tensor(ids), torch.tensor(seen)  # (N, P), (N, P)
    # Without top_k=0, transformers would sample from the 50 most probable tokens only.
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    ids = model.generate(ids, attention_mask=seen, max_new_tokens=MAX_TOKENS, **how)  # (N, P + C)
    answers = ids[:, P:]  # (N, C)
    # An answer ends with its first end token, which is trained too. What follows is padding.
    ends = (answers == tokenizer.eos_token_id).long()  # (N, C)
    mask = ends.cumsum(1) - ends == 0  # (N, C) True: a token of the answer, False: padding
    sequences = [(p, answer[kept].tolist()) for p, answer, kept in zip(prompts, answers, mask)]
    return sequences, tokenizer.batch_decode(answers, skip_special_tokens=True)


def advantages(reward):
    """(N,) -> (N,). The answers of a group are neighbours. A group of equal rewards gets zeros."""
    groups = reward.view(-1, SAMPLES)  # (N / SAMPLES, SAMPLES)
    mean = groups.mean(1, keepdim=True)  # (N / SAMPLES, 1)
    std = groups.std(1, keepdim=True, correction=0)  # (N / SAMPLES, 1)
    return ((groups - mean) / (std + 1e-4)).flatten()  # (N,)


def collate(sequences, weight):
    """Sequences -> a pack: one row of T tokens."""
    ids, positions, owner, predictors, advantage = [], [], [], [], []
    for i, (prompt, answer, a) in enumerate(sequences):
        predictors += range(len(ids) + len(prompt) - 1, len(ids) + len(prompt + answer) - 1)
        ids += prompt + answer
        positions += range(len(prompt + answer))  # 0: first token of a prompt
        owner += [i] * len(prompt + answer)
        advantage += [a] * len(answer)
    ids, owner, predictors = map(torch.tensor, (ids, owner, predictors))  # (T,), (T,), (R,)
    # A token sees itself and the earlier tokens of its own sequence.
    seen = (owner[:, None] == owner).tril()  # (T, T)
    return {"ids": ids[None], "positions": torch.tensor([positions]), "seen": seen[None, None],
            "predictors": predictors, "targets": ids[predictors + 1],  # (R,), (R,)
            "advantage": torch.tensor(advantage), "weight": weight}  # (R,), a number


def make_packs(sequences):
    """The packs of an optimizer step."""
    weight = 1 / sum(len(answer) for _, answer, _ in sequences)
    return [collate(sequences[i:i + PACK], weight) for i in range(0, len(sequences), PACK)]


def log_probs(model, pack):
    """log p of each token of the answers: (R,)."""
    # The output at a position predicts the token at the next position.
    logits = model(pack["ids"], attention_mask=pack["seen"], position_ids=pack["positions"],
                   logits_to_keep=pack["predictors"]).logits[0]  # (R, V)
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
