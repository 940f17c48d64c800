"""Step 5 of the ladder: the whole loop, with vLLM. Start reading at train().

    python -m learn.ladder.5_vllm [seed]

vLLM has its own copy of the weights and gets the trainer's after each update. If they did not
arrive, vLLM would sample from old weights, without an error. So two checks can stop the run:
checksums of the weights that vLLM did not repack (on a CPU 4 % of this model), and the gap between
the log-probs that vLLM and the trainer compute for the sampled tokens.

Shapes: a pack has T tokens, R of them in completions. N completions, V vocabulary.
"""
import sys

import torch
from transformers import AutoModelForCausalLM

from learn.ladder import ladder
from learn.ladder.ladder import MODEL, timed
from runtime import ranks
from runtime.engine import start_vllm
from runtime.sync import SentWeights

STEPS = 20
PROMPTS = 16  # per step
SAMPLES = 8  # completions to each prompt: a group
MINIBATCHES = 4  # optimizer steps per batch of completions; with 1, the ratio would stay 1
CLIP = 0.2  # a ratio that has moved beyond 0.8 or 1.2 is not pushed further
KL_COEF = 0.01  # price for leaving the starting model
PACK = 8  # sequences in one row
MAX_TOKENS = 96  # of a completion
LR = 1e-4


def sample(llm, tokenizer, examples, greedy=False):
    """A completion to each of N questions. -> N triples (prompt, completion, log-probs); texts."""
    from vllm import SamplingParams  # late: start_vllm sets it up. logprobs=0: the sampled token
    params = SamplingParams(temperature=0.0 if greedy else 1.0, max_tokens=MAX_TOKENS, logprobs=0)
    prompts = [{"prompt_token_ids": example["prompt_ids"]} for example in examples]
    sequences = []
    for example, request in zip(examples, llm.generate(prompts, params, use_tqdm=False)):
        completion = list(request.outputs[0].token_ids)
        logps = [at[x].logprob for x, at in zip(completion, request.outputs[0].logprobs)]
        sequences.append((example["prompt_ids"], completion, logps))
    return sequences, tokenizer.batch_decode([s[1] for s in sequences], skip_special_tokens=True)


def sync(model, llm):
    """Copies the weights into vLLM. Raises an error if one that can be read there differs."""
    # named_parameters() would leave out a head that shares its weights with the embedding.
    weights = SentWeights(model.state_dict().items())  # keeps a checksum of each tensor
    # Without an iterator, vLLM silently loads the weights of the start again.
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    weights.check(llm)
    llm.reset_prefix_cache()  # it has keys and values of the old weights


def advantages(reward):
    """(N,) -> (N,). A group's completions are neighbours. Equal rewards give zeros."""
    groups = reward.view(-1, SAMPLES)  # (N / SAMPLES, SAMPLES)
    mean = groups.mean(1, keepdim=True)  # (N / SAMPLES, 1)
    std = groups.std(1, keepdim=True, correction=0)  # (N / SAMPLES, 1)
    return ((groups - mean) / (std + 1e-4)).flatten()  # (N,)


def collate(sequences, weight):
    """Sequences -> a pack: one row of T tokens. weight: of each token."""
    ids, positions, owner, predictors, advantage, sampled = [], [], [], [], [], []
    for i, (prompt, completion, logps, a) in enumerate(sequences):
        start = len(ids) + len(prompt)
        ids += prompt + completion
        predictors += range(start - 1, len(ids) - 1)  # a position predicts the next token
        positions += range(len(prompt + completion))  # each begins at 0
        owner += [i] * len(prompt + completion)
        advantage += [a] * len(completion)
        sampled += logps
    ids, owner, predictors = map(torch.tensor, (ids, owner, predictors))  # (T,), (T,), (R,)
    # A token sees itself and the earlier tokens of its own sequence.
    attention = (owner[:, None] == owner).tril()  # (T, T)
    return {"ids": ids[None], "positions": torch.tensor([positions]),  # (1, T), (1, T)
            "attention": attention[None, None], "predictors": predictors,  # (1, 1, T, T), (R,)
            "targets": ids[predictors + 1], "sampled": torch.tensor(sampled),  # (R,), (R,)
            "advantage": torch.tensor(advantage), "weight": weight}  # (R,), a number


def make_packs(sequences):
    """The packs of an optimizer step."""
    weight = 1 / sum(len(completion) for _, completion, _, _ in sequences)
    return [collate(sequences[i:i + PACK], weight) for i in range(0, len(sequences), PACK)]


def log_probs(model, pack):
    """log p of each token of the completions: (R,)."""
    logits = model(pack["ids"], attention_mask=pack["attention"], position_ids=pack["positions"],
                   logits_to_keep=pack["predictors"]).logits[0]  # (R, V) only at these positions
    return logits.log_softmax(-1).gather(1, pack["targets"][:, None])[:, 0]  # (R,)


def policy_loss(logp, pack):
    """logp (R,) -> (). The pack's part of the mean over the tokens of its minibatch."""
    ratio = (logp - pack["old"]).exp()  # (R,) p now / p before the update
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)  # (R,) beyond this, a token is not pushed further
    token_loss = -torch.minimum(ratio * pack["advantage"], clipped * pack["advantage"])  # (R,)
    d = pack["ref"] - logp  # (R,) log(p of the starting model / p now)
    token_loss = token_loss + KL_COEF * (d.exp() - d - 1)  # (R,) k3: 0 where they agree, else > 0
    return (pack["weight"] * token_loss).sum()


def update(model, ref, optimizer, sequences, reward):
    """MINIBATCHES optimizer steps."""
    sequences = [(*s, a) for s, a in zip(sequences, advantages(reward).tolist())]
    parts = torch.randperm(len(reward)).chunk(MINIBATCHES)
    minibatches = [make_packs([sequences[i] for i in rows]) for rows in parts]
    with torch.no_grad():
        for pack in sum(minibatches, []):
            pack["old"] = log_probs(model, pack)  # (R,) by the trainer: the ratio starts at 1
            pack["ref"] = log_probs(ref, pack)  # (R,) of the starting model
            gap = (pack["old"] - pack["sampled"]).abs().max()
            assert gap < 0.01, f"vLLM and the trainer have different weights: gap {gap:.3f}"
    for packs in minibatches:
        optimizer.zero_grad()
        for pack in packs:
            policy_loss(log_probs(model, pack), pack).backward()  # the gradients add up
        optimizer.step()


def train(seed=0):
    ranks.init_process_group()  # of one process: vLLM wants one
    llm = start_vllm(model=MODEL, dtype="float32", seed=seed, max_num_seqs=256, max_model_len=256,
                     cuda_args={})
    torch.manual_seed(seed)
    tokenizer, train_set, test_set = ladder.questions(seed)
    model, ref = (AutoModelForCausalLM.from_pretrained(MODEL) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    rewards, seconds = [], {}
    for step in range(STEPS):
        examples = train_set[step * PROMPTS:(step + 1) * PROMPTS]
        examples = [example for example in examples for _ in range(SAMPLES)]
        with timed(seconds, "sampling"):
            sequences, texts = sample(llm, tokenizer, examples)
        reward = torch.tensor(ladder.score(texts, examples))  # (N,) 1 if right, else 0
        with timed(seconds, "updating"):
            update(model, ref, optimizer, sequences, reward)
            sync(model, llm)
        rewards.append(reward.mean().item())
        print(f"step {step:2}  reward {rewards[-1]:.3f}", flush=True)
    _, texts = sample(llm, tokenizer, test_set, greedy=True)
    ladder.report(__file__, seed, rewards, len(reward), seconds, texts, test_set)


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
