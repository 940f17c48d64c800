"""Step 2: step 1 + several completions of each question, which are compared with each other.

    python -m learn.ladder.2_group [seed]

New here: `advantages`. Everything else is step 1, with an advantage in the place of the reward.

Suppose that all completions of a question are right. Step 1 makes each of them more probable,
although none is better than the others. On average these pushes cancel, but in one batch they are
noise. So each question now gets a group of completions, and each is compared with its group:

    advantage = (reward - mean of its group) / (standard deviation of its group + 1e-4)
    loss = -(mean over all tokens of  advantage * log p(token))

Now the loss makes completions that are better than their group more probable, and completions that
are worse than their group less probable. If all rewards of a group are equal, its advantages are 0,
because there is nothing to prefer.

May we subtract something from the rewards? The mean of grad log p(o) is the sum over all o of
p(o) * grad log p(o) = grad p(o). All p(o) sum to 1, whose gradient is 0. So a number that is the
same for all completions of a question adds nothing to the mean of the gradient. The mean of a group
contains the completion itself, so it also makes the mean of the gradient shorter, by 1 / SAMPLES.
(All this is exact for a loss that divides by a constant. Ours divides by the number of tokens,
which depends on the samples.)

Divided by the deviation, the advantages have the same size for rewards of any scale. The 1e-4
avoids a division by 0. This advantage is the G of GRPO, group relative (arXiv:2402.03300). GRPO
first takes the mean of each completion; the mean over all tokens is DAPO's (arXiv:2503.14476).

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


def policy_loss(logp, advantage, mask):
    """The mean over all tokens. logp (N, C), advantage (N,), mask (N, C) -> ()"""
    advantage = advantage.unsqueeze(-1)  # (N, 1) each token has the advantage of its completion
    token_loss = -advantage * logp  # (N, C)
    return (mask * token_loss).sum() / mask.sum()  # ()


def update(model, optimizer, batch, advantage):
    """Takes one optimizer step."""
    logp = log_probs(model, batch)  # (N, C)
    loss = policy_loss(logp, advantage, batch.mask)  # ()
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
        questions = []
        for question in train_set[step * PROMPTS:(step + 1) * PROMPTS]:
            questions += [question] * SAMPLES  # a group

        start = time.perf_counter()
        batch, texts = sample(model, tokenizer, questions)
        sampled = time.perf_counter()
        reward = score(texts, questions)  # (N,)
        update(model, optimizer, batch, advantages(reward))
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
