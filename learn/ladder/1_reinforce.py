"""Step 1: REINFORCE, the simplest way to learn from a reward.

    python -m learn.ladder.1_reinforce [seed]

The model answers sums. It reads a prompt and writes a completion, one token after the other:

    prompt      <|user|>14+2-9<|assistant|>
    completion  <think>14+2=16
                16-9=7</think><answer>7</answer>

It has two habits. It works a sum out, as above, or it guesses: <think></think><answer>9</answer>.
Nobody shows it a right answer. The model samples completions, `score` gives reward 1 to those with
the right answer and reward 0 to the others, and `update` makes the rewarded ones more probable. In
the words of RL, the model is the policy.

Let p(o) be the probability that the model writes the completion o, and r(o) its reward. We want a
larger mean reward J. Because grad p = p * grad log p,

    J      = sum over all o of  p(o) * r(o)
    grad J = sum over all o of  p(o) * r(o) * grad log p(o)

Nobody can sum over all completions. But the second sum is a mean, and a mean can be estimated: we
sample completions from p and average r(o) * grad log p(o). And log p(o) is the sum of log p(token)
over the tokens of o. So the whole algorithm is to sample, and to take an optimizer step on

    loss = -(mean over all tokens of  reward * log p(token))

This is REINFORCE (Williams 1992). The formula above divides by the number of samples, and this loss
divides by the number of tokens, which changes the length of the step.

Shapes: N completions, P tokens of the longest prompt, C of the longest completion, V vocabulary.
"""
import sys
import time
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from learn.ladder import ladder

STEPS = 20
PROMPTS = 128  # per step
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


def policy_loss(logp, reward, mask):
    """The mean over all tokens. logp (N, C), reward (N,), mask (N, C) -> ()"""
    reward = reward.unsqueeze(-1)  # (N, 1) each token has the reward of its completion
    token_loss = -reward * logp  # (N, C)
    return (mask * token_loss).sum() / mask.sum()  # ()


def update(model, optimizer, batch, reward):
    """Takes one optimizer step."""
    logp = log_probs(model, batch)  # (N, C)
    loss = policy_loss(logp, reward, batch.mask)  # ()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(seed=0):
    torch.manual_seed(seed)
    tokenizer, train_set, test_set = ladder.load_questions(seed)
    model = AutoModelForCausalLM.from_pretrained(ladder.MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    log = []
    for step in range(STEPS):
        questions = train_set[step * PROMPTS:(step + 1) * PROMPTS]

        start = time.perf_counter()
        batch, texts = sample(model, tokenizer, questions)
        sampled = time.perf_counter()
        reward = score(texts, questions)  # (N,)
        update(model, optimizer, batch, reward)
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
