"""learn/lab/honest_search.py: its two rules on draws whose truth is known, and its runs."""
import random

import pytest

from conftest import within
from learn.lab import honest_search


def normal_draws(rng, gains):
    """measure(setting, n) for a search: results with deviation 1 around a setting's gain."""
    return lambda setting, n: [rng.gauss(gains.get(setting, 0.0), 1.0) for _ in range(n)]


@pytest.mark.parametrize("runs", [1, 5])
def test_keep_if_higher_keeps_as_many_null_edits_as_there_are_records(runs):
    """The k-th of equal results is the highest with probability p = 1 / k: their sum, p (1 - p)."""
    rng, edits, times = random.Random(0), range(1, 41), 1000
    kept = 0
    for _ in range(times):
        found = honest_search.keep_if_higher(0, edits, normal_draws(rng, {}), runs)
        kept += sum(row["kept"] for row in found)
    chances = [1 / k for k in range(2, 42)]
    deviation = (sum(p * (1 - p) for p in chances) / times) ** 0.5
    within(abs(kept / times - sum(chances)), 4 * deviation)


def test_a_search_of_null_edits_keeps_one_in_at_most_5_percent():
    """Beyond 0.05 by 4 deviations of the binomial only if the rule is wrong."""
    rng, times = random.Random(0), 150
    wrong = 0
    for _ in range(times):
        found = honest_search.search(0, range(1, 41), normal_draws(rng, {}))
        wrong += any(row["kept"] for row in found)
    within(wrong / times, 0.05 + 4 * (0.05 * 0.95 / times) ** 0.5)


def test_a_search_keeps_what_helps_and_spends_few_runs_on_what_harms():
    rng = random.Random(0)
    gains = {"helps": 10.0, "harms": -10.0, "helps less": 5.0}
    edits = ["harms", "helps", "helps less", *range(37)]
    found = honest_search.search("first", edits, normal_draws(rng, gains))
    assert [row["edit"] for row in found if row["kept"]] == ["helps"]
    assert [row["runs"] for row in found[:3]] == [5, 5, 5]


def test_the_interval_of_a_search_is_wider_the_more_it_asks():
    tried, best = [3.0, 4.0, 5.0], [0.0, 1.0, 2.0]
    low, high = honest_search.interval(tried, best, tries=1, looks=(3,))
    within(abs(low - (3 - 2.776445 * (2 / 3) ** 0.5)), 1e-5)  # t of 4 degrees of freedom
    lower, higher = honest_search.interval(tried, best, tries=40)
    assert lower < low and high < higher


def test_edits_draw_runs_that_the_first_setting_does_not_have_and_none_twice():
    pools = {"null": list(range(40)), "rate 2e-4": list(range(100, 110))}
    measure = honest_search.drawn(pools, random.Random(0))
    first = measure(honest_search.FIRST, 10)
    for setting in (("null", 1), ("null", 2), ("rate 2e-4", 1)):
        runs = measure(setting, 5) + measure(setting, 5)
        assert len(set(runs)) == 10 and not set(runs) & set(first)
        assert set(runs) <= set(pools[setting[0]])
