"""Step 4: step 3 + packs in place of padding, and one weight for all tokens.

    python -m learn.ladder.4_pack [seed]

New here: `Sequence`, `collate`, `make_packs`, and what they change in `sample`, `log_probs` and
`update`. The loss is that of step 3.

In step 3 the trainer computes all places of a rectangle, and most of them can be padding: one long
completion makes all rows long. A pack is one row in which sequences lie end to end, each a prompt
and its completion. No place is wasted. Two things keep the sequences apart: a mask of T x T, in
which a token sees earlier tokens of its own sequence only, and positions that begin at 0 for each
sequence.

An optimizer step has several packs. Each pack has its own backward pass, which needs less memory
than one pass for all of them, and the gradients add up. For this the loss must be a sum:

    loss of a pack = sum over its tokens of  weight * token_loss
    weight = 1 / (number of completion tokens in all packs of this optimizer step)

The weight is the same number for all packs of an optimizer step. So together they give the mean
over all tokens of step 3, however the sequences are split into packs. `sample` pads as before.

Shapes: a pack has T tokens, R of them in completions. N completions, V vocabulary.
"""
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from learn.ladder import ladder

STEPS = 20
PROMPTS = 16  # per step
SAMPLES = 8  # completions of each prompt: a group
MINIBATCHES = 4  # optimizer steps per batch of completions
CLIP = 0.2
KL_COEF = 0.01
PACK = 8  # sequences in a pack
MAX_TOKENS = 96  # of a completion
LR = 1e-4


@dataclass
class Sequence:
    """A prompt and its completion, without padding."""
    prompt: list  # of token ids
    completion: list  # of token ids
    advantage: float = 0.0


def sample(model, tokenizer, questions, greedy=False):
    """Writes a completion to each of N questions. -> (N sequences, N texts)"""
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
    # learn to stop. Behind the end token there is padding.
    is_end = (completions == tokenizer.eos_token_id).long()  # (N, C)
    ends_before = is_end.cumsum(1) - is_end  # (N, C)
    mask = ends_before == 0  # (N, C) True: a token of the completion, False: padding
    sequences = []
    for prompt, completion, is_token in zip(prompts, completions, mask):
        tokens = completion[is_token].tolist()
        sequences.append(Sequence(prompt, tokens))
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return sequences, texts


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


def collate(sequences, weight):
    """Lays sequences end to end in one row. weight: of each token in the loss. -> pack

    Two sequences of three and two prompt tokens p, each with two completion tokens c:

        ids         p p p c c p p c c
        positions   0 1 2 3 4 0 1 2 3
        owner       0 0 0 0 0 1 1 1 1
        predictors  2, 3, 6 and 7: the places before each c, because logits are of the next token
    """
    ids, positions, owner = [], [], []  # T entries each
    predictors, advantage = [], []  # R entries each
    for number, sequence in enumerate(sequences):
        tokens = sequence.prompt + sequence.completion
        first = len(ids) + len(sequence.prompt)  # place of the first completion token
        ids += tokens
        positions += range(len(tokens))
        owner += [number] * len(tokens)
        predictors += range(first - 1, len(ids) - 1)
        advantage += [sequence.advantage] * len(sequence.completion)
    ids = torch.tensor(ids)  # (T,)
    positions = torch.tensor(positions)  # (T,)
    owner = torch.tensor(owner)  # (T,)
    predictors = torch.tensor(predictors)  # (R,)
    same_sequence = owner[:, None] == owner  # (T, T)
    attention = same_sequence.tril()  # (T, T) a token (row) sees itself and earlier ones (columns)
    return SimpleNamespace(
        ids=ids[None],  # (1, T)
        positions=positions[None],  # (1, T)
        attention=attention[None, None],  # (1, 1, T, T)
        predictors=predictors,  # (R,)
        targets=ids[predictors + 1],  # (R,)
        advantage=torch.tensor(advantage),  # (R,)
        weight=weight,
    )


def make_packs(sequences):
    """The packs of an optimizer step."""
    tokens = sum(len(sequence.completion) for sequence in sequences)
    packs = []
    for start in range(0, len(sequences), PACK):
        part = sequences[start:start + PACK]
        packs.append(collate(part, weight=1 / tokens))
    return packs


def log_probs(model, pack):
    """log p of each token of the completions. -> (R,)"""
    output = model(
        pack.ids,
        attention_mask=pack.attention,
        position_ids=pack.positions,
        logits_to_keep=pack.predictors,  # no logits at other places
    )
    logits = output.logits[0]  # (R, V)
    logp = logits.log_softmax(-1)  # (R, V) of all tokens that could have come
    logp = logp.gather(-1, pack.targets.unsqueeze(-1))  # (R, 1) of the tokens that came
    return logp.squeeze(-1)  # (R,)


def policy_loss(logp, old, ref, advantage, weight):
    """The pack's part of the mean over all tokens. Tensors (R,) -> ()

    logp, old, ref: log p of the tokens now, before this update, and by the starting model."""
    ratio = (logp - old).exp()  # (R,)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)  # (R,)
    objective = torch.minimum(ratio * advantage, clipped * advantage)  # (R,)
    d = ref - logp  # (R,)
    k3 = d.exp() - d - 1  # (R,)
    token_loss = -objective + KL_COEF * k3  # (R,)
    return (weight * token_loss).sum()  # ()


def update(model, ref_model, optimizer, sequences, advantage):
    """Takes MINIBATCHES optimizer steps, each on its own part of the sequences."""
    for sequence, value in zip(sequences, advantage.tolist()):
        sequence.advantage = value
    minibatches = []
    order = torch.randperm(len(sequences))  # (N,)
    for rows in order.chunk(MINIBATCHES):  # (N / MINIBATCHES,)
        part = [sequences[row] for row in rows]
        minibatches.append(make_packs(part))
    with torch.no_grad():  # before the first optimizer step
        for packs in minibatches:
            for pack in packs:
                pack.old = log_probs(model, pack)  # (R,)
                pack.ref = log_probs(ref_model, pack)  # (R,)
    for packs in minibatches:
        optimizer.zero_grad()
        for pack in packs:
            logp = log_probs(model, pack)  # (R,)
            loss = policy_loss(logp, pack.old, pack.ref, pack.advantage, pack.weight)  # ()
            loss.backward()  # adds to the gradients of the packs before
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
        sequences, texts = sample(model, tokenizer, questions)
        sampled = time.perf_counter()
        reward = score(texts, questions)  # (N,)
        update(model, ref_model, optimizer, sequences, advantages(reward))
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
