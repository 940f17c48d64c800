"""DPO in four steps, each with exact numbers: one question, five answers.

    python -m learn.dpo

1. RLHF maximises the mean reward minus beta KL(pi || ref). The best policy is
       pi*(y) = ref(y) exp(r(y) / beta) / Z,   Z = sum of ref(y) exp(r(y) / beta) over all y.
2. Solved for the reward: r(y) = beta log(pi*(y) / ref(y)) + beta log Z. Z needs all answers, of
   which a language model has too many.
3. Bradley and Terry: people prefer y to y' with the probability sigmoid(r(y) - r(y')). In the
   difference beta log Z cancels, so preferences need no Z:
       P(y over y') = sigmoid(beta log(pi*(y) / ref(y)) - beta log(pi*(y') / ref(y'))).
4. So take pi for pi* and make the preferences that were seen probable: the loss of DPO,
       -log sigmoid(beta log(pi(w) / ref(w)) - beta log(pi(l) / ref(l))),   w preferred to l.
   Its minimum over all preferences is pi*: no reward model and no sampling, but pairs.

The paper is arXiv:2305.18290, sections 3 and 4. examples/dpo.py trains with it, on pairs that a
verifier makes; examples/preferences.py has its relatives.
"""
import itertools

import torch

BETA = 0.5
REWARDS = torch.tensor([1.0, 0.5, 0.0, 0.0, -1.0], dtype=torch.float64)  # (Y,)
REF = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1], dtype=torch.float64)  # (Y,)
PAIRS = list(itertools.combinations(range(5), 2))


def objective(policy):
    """What RLHF maximises, a number. policy: (Y,) probabilities."""
    log_ratio = (policy / REF).log()  # (Y,)
    kl = policy @ log_ratio  # ()
    reward = policy @ REWARDS  # ()
    return (reward - BETA * kl).item()


def best_policy():
    """Step 1: (pi* (Y,), Z)."""
    tilted = REF * (REWARDS / BETA).exp()  # (Y,)
    z = tilted.sum()  # ()
    return tilted / z, z


def reward_of(policy):
    """Step 2, without beta log Z: (Y,) -> (Y,)."""
    return BETA * (policy / REF).log()  # (Y,)


def preferences(reward):
    """Step 3: the probability that the first answer of each pair is preferred (pairs,)."""
    first, second = torch.tensor(PAIRS).T  # (pairs,), (pairs,)
    return torch.sigmoid(reward[first] - reward[second])  # (pairs,)


def dpo_loss(logits):
    """Step 4: its mean over all pairs and both outcomes, weighted by how often people choose each:
    a cross-entropy. logits (Y,) of the policy."""
    reward = reward_of(logits.softmax(0))  # (Y,)
    said = preferences(reward)  # (pairs,)
    seen = preferences(REWARDS)  # (pairs,)
    return torch.nn.functional.binary_cross_entropy(said, seen)


def train(steps=2000):
    """Minimises the loss from the reference -> policy (Y,)."""
    logits = REF.log().requires_grad_()  # (Y,)
    adam = torch.optim.Adam([logits], lr=0.02)
    for _ in range(steps):
        adam.zero_grad()
        dpo_loss(logits).backward()
        adam.step()
    return logits.detach().softmax(0)  # (Y,)


def main():
    def shown(values):
        return "  ".join(f"{value:6.3f}" for value in values.tolist())

    best, z = best_policy()
    print("reward                    ", shown(REWARDS))
    print("ref                       ", shown(REF), f"  objective {objective(REF):.4f}")
    print("1. pi*                    ", shown(best), f"  objective {objective(best):.4f}")
    print("2. beta log(pi* / ref)    ", shown(reward_of(best)))
    print("   and + beta log Z       ", shown(reward_of(best) + BETA * z.log()))
    without_z = preferences(reward_of(best))  # (pairs,)
    gaps = preferences(REWARDS) - without_z  # (pairs,)
    print(f"3. preferences without Z:  at most {gaps.abs().max().item():.1e} off")
    trained = train()
    print("4. after DPO              ", shown(trained), f"  objective {objective(trained):.4f}")


if __name__ == "__main__":
    main()
