"""Step 5: the whole loop of GRPO in one file. vLLM samples, PyTorch trains.

    python -m learn.ladder.5_vllm [seed]

The model answers sums. It reads a prompt and writes a completion, one token after the other:

    prompt      <|user|>14+2-9<|assistant|>
    completion  <think>14+2=16
                16-9=7</think><answer>7</answer>

It has two habits. It works a sum out, as above, or it guesses: <think></think><answer>9</answer>.
Nobody shows it a right answer, and nobody tells it which habit is the better one. It learns from
its own completions. Each of 20 steps does this:

1. `sample`       vLLM, an engine that only generates, writes 8 completions of each of 16 prompts.
                  The 8 completions of a prompt are a group.
2. `score`        A right answer has reward 1, a wrong answer has reward 0.
3. `advantages`   Each reward is compared with the rewards of its group.
4. `update`       The tokens of completions that are better than their group become more probable,
                  the tokens of worse ones less probable. `policy_loss` says by how much.
5. `sync`         vLLM has its own copy of the weights, and now gets the new ones.

The functions stand in this order, and `train` at the end calls them, all on one CPU core. To step 4
of the ladder this file adds vLLM and the sync. It also makes its own questions, so that no other
file needs reading.

If a sync failed, vLLM would go on sampling from old weights, without any error. So two checks can
stop the run. `sync` compares checksums of the weights. `update` compares the log-probs that vLLM
and the trainer compute for the same tokens.

nano_rlvr.py has the same stages: its stages 4 to 7 are stage 4 here. The main differences are four.
By default it takes one update per step, so nothing is clipped. A token weighs 1 / (sequences *
tokens of its sequence) there; here all tokens weigh the same, as with --aggregate token. It
multiplies the loss by min(pi_old / pi_vllm, 2). And a completion that could not be judged has no
reward, instead of 0.

Shapes: N completions. A pack has T tokens, R of them in completions. V vocabulary.
"""
import random
import sys
import time
import zlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learn.ladder import ladder
from runtime import ranks
from runtime.engine import start_vllm
from runtime.sync import SentWeights

MODEL = "models/tiny"  # 0.8 M parameters, made for this project
STEPS = 20
PROMPTS = 16  # per step
SAMPLES = 8  # completions of each prompt: a group
MAX_TOKENS = 96  # of a completion
MINIBATCHES = 4  # optimizer steps per round of the loop, each on a quarter of its completions
PACK = 8  # sequences in a row of the trainer
LR = 1e-4
CLIP = 0.2  # a token whose probability has moved by 20 % is not pushed further in this step
KL_COEF = 0.01  # the price for leaving the starting model
MAX_GAP = 0.01  # between a log-prob of vLLM and the trainer's


# ---------------------------------------------------------------------- questions and their prompts

@dataclass
class Question:
    text: str  # 14+2-9
    answer: str  # 7
    prompt: list  # token ids of <|user|>14+2-9<|assistant|>


def make_sum(rng):
    """A random sum of 3 to 6 numbers, and its value. No total on the way leaves 0 to 99."""
    total = rng.randint(1, 20)
    text = str(total)
    for _ in range(rng.randint(2, 5)):
        terms = [x for x in range(-20, 21) if x != 0 and 0 <= total + x <= 99]
        term = rng.choice(terms)
        total += term
        text += f"{term:+d}"  # with its sign: +2, -9
    return text, str(total)


def make_questions(tokenizer, split, size, seed):
    """Questions of the split "train" or "test". No sum is in both: its checksum decides."""
    rng = random.Random(f"arithmetic/{split}/{seed}")
    answers = {}  # text -> answer
    while len(answers) < size:
        text, answer = make_sum(rng)
        is_test = zlib.crc32(text.encode()) % 8 == 0  # one sum of eight
        if is_test == (split == "test"):
            answers[text] = answer
    questions = []
    for text, answer in answers.items():
        # what tokenizer.apply_chat_template makes of a message of the user
        prompt = tokenizer.encode(f"<|user|>{text}<|assistant|>")
        questions.append(Question(text, answer, prompt))
    return questions


# --------------------------------------------------------------------------- 1. sample and 2. score

@dataclass
class Sequence:
    """A prompt and a completion that vLLM has written."""
    prompt: list  # token ids
    completion: list  # token ids
    vllm_logps: list  # vLLM's log p of each token of the completion, for the check of the sync
    advantage: float = 0.0  # update() fills it in


def sample(llm, questions, greedy=False):
    """Writes a completion to each of N questions. -> (N sequences, N texts)"""
    from vllm import SamplingParams  # not at the top: start_vllm must set vLLM up first
    params = SamplingParams(
        temperature=0.0 if greedy else 1.0,  # 0: always the most probable token
        max_tokens=MAX_TOKENS,
        logprobs=0,  # of the sampled token, and of 0 other tokens
    )
    prompts = [{"prompt_token_ids": question.prompt} for question in questions]
    sequences, texts = [], []
    requests = llm.generate(prompts, params, use_tqdm=False)
    for question, request in zip(questions, requests):
        output = request.outputs[0]
        logps = []
        for token, candidates in zip(output.token_ids, output.logprobs):
            logps.append(candidates[token].logprob)
        completion = list(output.token_ids)  # the last one is the end token, unless it was cut
        sequences.append(Sequence(question.prompt, completion, logps))
        texts.append(output.text)
    return sequences, texts


def score(texts, questions):
    """The rewards: 1 if the last answer in a text is exactly the right one, else 0. -> (N,)"""
    rewards = []
    for text, question in zip(texts, questions):
        answer = text.rpartition("<answer>")[2]  # all that follows the last <answer>
        answer = answer.partition("</answer>")[0]  # the tag at the end may be missing
        rewards.append(float(answer == question.answer))
    return torch.tensor(rewards)  # (N,)


# ------------------------------------------------------------------------------------ 3. advantages

def advantages(reward):
    """Compares each reward with those of its group, SAMPLES neighbours. (N,) -> (N,)

    The advantages of a group have mean 0 and deviation 1. If one answer of eight is right, its
    advantage is 2.65, and each wrong one has -0.38. If all rewards of a group are equal, all its
    advantages are 0: there is nothing to prefer."""
    groups = reward.view(-1, SAMPLES)  # (PROMPTS, SAMPLES)
    mean = groups.mean(1, keepdim=True)  # (PROMPTS, 1)
    std = groups.std(1, keepdim=True, correction=0)  # (PROMPTS, 1)
    advantage = (groups - mean) / (std + 1e-4)  # (PROMPTS, SAMPLES)
    return advantage.flatten()  # (N,)


# ---------------------------------------------------------------------------------------- 4. update

def collate(sequences, weight):
    """Lays sequences end to end in one row. weight: of each token in the loss. -> pack

    Two sequences of three and two prompt tokens p, each with two completion tokens c:

        ids         p p p c c p p c c
        positions   0 1 2 3 4 0 1 2 3
        owner       0 0 0 0 0 1 1 1 1
        predictors  2, 3, 6 and 7: the places before each c, because logits are of the next token
    """
    ids, positions, owner = [], [], []  # T entries each
    predictors, vllm_logps, advantage = [], [], []  # R entries each
    for number, sequence in enumerate(sequences):
        tokens = sequence.prompt + sequence.completion
        first = len(ids) + len(sequence.prompt)  # place of the first completion token
        ids += tokens
        positions += range(len(tokens))
        owner += [number] * len(tokens)
        predictors += range(first - 1, len(ids) - 1)
        vllm_logps += sequence.vllm_logps
        advantage += [sequence.advantage] * len(sequence.completion)
    ids = torch.tensor(ids)  # (T,) the list becomes a tensor
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
        vllm_logps=torch.tensor(vllm_logps),  # (R,)
        advantage=torch.tensor(advantage),  # (R,)
        weight=weight,  # a number
    )  # update() adds old and ref


def make_packs(sequences):
    """The packs of an optimizer step. Their losses add up to the mean over all tokens."""
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
    # At the first optimizer step the ratio is 1, but it still has a gradient, that of log p. So a
    # token with a positive advantage becomes more probable, and one with a negative less.
    ratio = (logp - old).exp()  # (R,) p now / p before the update
    # A token that has moved by CLIP in the direction of its advantage has no gradient any more: the
    # minimum takes the clipped ratio, which is constant there.
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)  # (R,)
    objective = torch.minimum(ratio * advantage, clipped * advantage)  # (R,)
    # k3 is 0 where the model agrees with the starting model, and positive elsewhere. Its mean
    # over tokens that the model samples is KL(model || starting model).
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
                gap = (pack.old - pack.vllm_logps).abs().max()  # ()
                assert gap < MAX_GAP, f"vLLM and the trainer have different weights: gap {gap:.3f}"
    for packs in minibatches:
        optimizer.zero_grad()
        for pack in packs:
            logp = log_probs(model, pack)  # (R,)
            loss = policy_loss(logp, pack.old, pack.ref, pack.advantage, pack.weight)  # ()
            loss.backward()  # adds to the gradients of the packs before
        optimizer.step()


# ------------------------------------------------------------------------------------------ 5. sync

def sync(model, llm):
    """Copies the weights into vLLM. Raises RunError if a weight that can be read there differs.

    On a CPU, only 4 % of this model's weights can be read: vLLM stores the others in the layout of
    a kernel. Old weights among these show in the log-probs, which update() compares."""
    # named_parameters() would leave out the head, which shares its weights with the embedding.
    weights = SentWeights(model.state_dict().items())  # keeps a checksum of each tensor
    # vLLM's own method takes the weights. Without an iterator, it would silently load those of the
    # start from the disk again.
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    weights.check(llm)
    llm.reset_prefix_cache()  # it has keys and values that the old weights have computed


# --------------------------------------------------------------------------------------- the loop

def train(seed=0):
    ranks.init_process_group()  # of one process: vLLM needs a group
    llm = start_vllm(
        model=MODEL,
        dtype="float32",
        seed=seed,
        max_num_seqs=256,  # completions at a time
        max_model_len=256,  # tokens of a prompt and its completion
        cuda_args={},  # more arguments for a GPU
    )
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # as in all steps of the ladder, so that their seconds compare
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    train_set = make_questions(tokenizer, "train", STEPS * PROMPTS, seed)
    test_set = make_questions(tokenizer, "test", 256, seed=0)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    ref_model = AutoModelForCausalLM.from_pretrained(MODEL)  # never trained
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    log = []
    for step in range(STEPS):
        questions = []
        for question in train_set[step * PROMPTS:(step + 1) * PROMPTS]:
            questions += [question] * SAMPLES  # a group

        start = time.perf_counter()
        sequences, texts = sample(llm, questions)
        sampled = time.perf_counter()
        reward = score(texts, questions)  # (N,)
        update(model, ref_model, optimizer, sequences, advantages(reward))
        sync(model, llm)
        updated = time.perf_counter()

        mean = reward.mean().item()
        log.append({
            "reward": mean,
            "sampling": sampled - start,
            "updating": updated - sampled,
        })
        print(f"step {step:2}  reward {mean:.3f}", flush=True)

    _, texts = sample(llm, test_set, greedy=True)
    accuracy = score(texts, test_set).mean().item()
    ladder.report(__file__, seed, log, accuracy)


if __name__ == "__main__":
    seed = sys.argv[1] if len(sys.argv) > 1 else 0
    train(int(seed))
