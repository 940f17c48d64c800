"""Step 3: step 2 + several optimizer steps on the completions of each batch.

    python -m learn.ladder.3_clip [seed]

New here: `policy_loss` and `update`. Everything else is step 2.

Sampling is slow, so we want more than one optimizer step from the same completions. But after the
first optimizer step, the model is no longer the model that sampled them. Three things keep this
safe. p_old is the probability before the first of these optimizer steps.

1. The ratio. A completion that has become twice as probable would now be sampled twice as often, so
it counts twice:

    ratio = p(token) / p_old(token)
    token_loss = -ratio * advantage

The gradient of the ratio is ratio * grad log p. At the first optimizer step the ratio is 1, and the
gradient is that of step 2. A ratio per token, and not per completion, is nearly right as long as
the two models are close.

2. The clip (PPO, arXiv:1707.06347). A token whose ratio has moved far enough has no gradient:

    token_loss = -min(ratio * advantage, clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)

    advantage > 0:  no gradient above 1 + CLIP, but the full gradient below 1 - CLIP
    advantage < 0:  no gradient below 1 - CLIP, but the full gradient above 1 + CLIP

So the clip stops a token that has moved far in the wanted direction. It never stops a token that
has moved in the wrong direction and must come back.

3. The KL term (arXiv:2402.03300). The reference is the starting model, frozen. The term

    k3 = exp(d) - d - 1    with d = log p_ref - log p

is 0 where model and reference agree, and positive elsewhere. In the loss it holds the model near
its start. If the tokens are sampled from p, the mean of k3 is the KL divergence from the model to
the reference. Here they are sampled from p_old, so the mean of k3 is slightly off.

Shapes: N completions, P tokens of the longest prompt, C of the longest completion, V vocabulary.
"""
import sys
import time
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from learn.ladder import ladder

STEPS = 20
PROMPTS = 16  # per step
SAMPLES = 8  # completions of each prompt: a group
MINIBATCHES = 4  # optimizer steps per batch of completions
CLIP = 0.2
KL_COEF = 0.01
MAX_TOKENS = 96  # of a completion
LR = 1e-4


@dataclass
class Batch:
    """N prompts, padded on the left, and their completions, padded on the right."""
    ids: torch.Tensor  # (N, P + C)
    attention: torch.Tensor  # (N, P + C) 1: a token, 0: padding
    mask: torch.Tensor  # (N, C) 1: a token of the completion, 0: padding


def sample(model, tokenizer, questions, greedy=False):
    """Writes a completion to each of N questions. -> (Batch, N texts)"""
    prompts = [question.prompt for question in questions]
    padded = tokenizer.pad(
        {"input_ids": prompts},
        padding_side="left",  # so that all completions begin in the same column
        return_tensors="pt",
    )
    ids = model.generate(
        **padded,
        max_new_tokens=MAX_TOKENS,
        do_sample=True,
        top_k=1 if greedy else 0,  # 1: the most probable token. 0: any token, by its probability
    )  # (N, P + C)
    P = padded["input_ids"].shape[1]
    completions = ids[:, P:]  # (N, C)
    # A completion ends with its first end token. The end token is trained, too: the model must
    # learn to stop. Behind the end token there is padding:
    #     is_end      0 0 1 1
    #     ends_before 0 0 0 1
    #     mask        1 1 1 0
    is_end = (completions == tokenizer.eos_token_id).long()  # (N, C)
    ends_before = is_end.cumsum(1) - is_end  # (N, C)
    mask = (ends_before == 0).long()  # (N, C)
    attention = torch.cat([padded["attention_mask"], mask], dim=1)  # (N, P + C)
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return Batch(ids, attention, mask), texts


def score(texts, questions):
    """The rewards: 1 if the last answer in a text is exactly the right one, else 0. -> (N,)"""
    rewards = []
    for text, question in zip(texts, questions):
        answer = text.rpartition("<answer>")[2]  # all that follows the last <answer>
        answer = answer.partition("</answer>")[0]  # the tag at the end may be missing
        rewards.append(float(answer == question.answer))
    return torch.tensor(rewards)  # (N,)


def advantages(reward):
    """Compares each reward with those of its group, SAMPLES neighbours. (N,) -> (N,)"""
    groups = reward.view(-1, SAMPLES)  # (PROMPTS, SAMPLES)
    mean = groups.mean(1, keepdim=True)  # (PROMPTS, 1)
    std = groups.std(1, keepdim=True, correction=0)  # (PROMPTS, 1)
    advantage = (groups - mean) / (std + 1e-4)  # (PROMPTS, SAMPLES)
    return advantage.flatten()  # (N,)


def log_probs(model, batch):
    """log p of each token of the completions. -> (N, C)"""
    # The first token of a prompt has position 0, however much padding stands before it.
    positions = batch.attention.cumsum(1) - 1  # (N, P + C) -1 in the padding on the left
    output = model(
        batch.ids,
        attention_mask=batch.attention,
        position_ids=positions.clamp(min=0),
    )
    C = batch.mask.shape[1]
    # The logits at a place are those of the next token. So the logits for the completions begin
    # and end one column before the completions.
    logits = output.logits[:, -C - 1:-1]  # (N, C, V)
    completions = batch.ids[:, -C:]  # (N, C)
    logp = logits.log_softmax(-1)  # (N, C, V) of all tokens that could have come
    logp = logp.gather(-1, completions.unsqueeze(-1))  # (N, C, 1) of the tokens that came
    return logp.squeeze(-1)  # (N, C)


def policy_loss(logp, old, ref, advantage, mask):
    """The mean over all tokens. logp, old, ref, mask (N, C), advantage (N,) -> ()

    logp, old, ref: log p of the tokens now, before this update, and by the starting model."""
    advantage = advantage.unsqueeze(-1)  # (N, 1) each token has the advantage of its completion
    ratio = (logp - old).exp()  # (N, C)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)  # (N, C)
    objective = torch.minimum(ratio * advantage, clipped * advantage)  # (N, C)
    d = ref - logp  # (N, C)
    k3 = d.exp() - d - 1  # (N, C)
    token_loss = -objective + KL_COEF * k3  # (N, C)
    return (mask * token_loss).sum() / mask.sum()  # ()


def update(model, ref_model, optimizer, batch, advantage):
    """Takes MINIBATCHES optimizer steps, each on its own part of the completions."""
    with torch.no_grad():  # before the first optimizer step
        old = log_probs(model, batch)  # (N, C)
        ref = log_probs(ref_model, batch)  # (N, C)
    order = torch.randperm(len(advantage))  # (N,)
    for rows in order.chunk(MINIBATCHES):  # (N / MINIBATCHES,)
        minibatch = Batch(
            ids=batch.ids[rows],
            attention=batch.attention[rows],
            mask=batch.mask[rows],
        )
        logp = log_probs(model, minibatch)  # (N / MINIBATCHES, C)
        loss = policy_loss(logp, old[rows], ref[rows], advantage[rows], minibatch.mask)  # ()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train(seed=0):
    torch.manual_seed(seed)
    tokenizer, train_set, test_set = ladder.load_questions(seed)
    model = AutoModelForCausalLM.from_pretrained(ladder.MODEL)
    ref_model = AutoModelForCausalLM.from_pretrained(ladder.MODEL)  # never trained
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    log = []
    for step in range(STEPS):
        questions = []
        for question in train_set[step * PROMPTS:(step + 1) * PROMPTS]:
            questions += [question] * SAMPLES  # a group

        start = time.perf_counter()
        batch, texts = sample(model, tokenizer, questions)
        sampled = time.perf_counter()
        reward = score(texts, questions)  # (N,)
        update(model, ref_model, optimizer, batch, advantages(reward))
        updated = time.perf_counter()

        mean = reward.mean().item()
        log.append({
            "reward": mean,
            "sampling": sampled - start,
            "updating": updated - sampled,
        })
        print(f"step {step:2}  reward {mean:.3f}", flush=True)

    _, texts = sample(model, tokenizer, test_set, greedy=True)
    accuracy = score(texts, test_set).mean().item()
    ladder.report(__file__, seed, log, accuracy)


if __name__ == "__main__":
    seed = sys.argv[1] if len(sys.argv) > 1 else 0
    train(int(seed))
