"""Small statistics of groups and of evaluation."""
import math


def flat(group):
    """Whether all verdicts of a group of rollouts are the same: nothing is learned from it."""
    return len({r.reward for r in group} - {None}) <= 1


def wilson(hits, n):
    """95 % interval of a share, hits of n (Wilson 1927: right for small n and near 0 and 1 too)."""
    z, p = 1.959964, hits / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def pass_at_k(n, correct, k):
    """Chance that k of n samples, of which `correct` are right, hold a right one: 1 - C(n-c, k) / C(n, k) (arXiv:2107.03374)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)
