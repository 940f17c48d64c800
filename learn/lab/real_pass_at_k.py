"""A real model: does RL teach, or bring out what many samples already hold?"""
from learn.lab import lab

MEASURES = {}
for title, key in (("pass@1", "eval/mean@128"), ("pass@8", "eval/pass@8"),
                   ("pass@32", "eval/pass@32"), ("pass@128", "eval/pass@128")):
    MEASURES[f"{title} before"] = lab.at(key, 0), lab.share
    MEASURES[title] = lab.at(key, -1), lab.share

FINDING = lab.Finding(
    claim="After RL a model is better than before at small k of pass@k (k = 1), and worse at large "
          "k: it samples more often what it could do already.",
    source="2504.13837",
    checks=[lab.gain("RL, larger numbers", "pass@1", low=0, sd=0.04),
            lab.gain("RL, larger numbers", "pass@128", high=0, sd=0.04)],
    chapter=3,
    arms={"RL, larger numbers": "nano_rlvr.py --rewards examples/products.py:right"},
    # on the task itself, 128 samples of the untrained model would hit nearly every answer
    flags="--eval_data examples/products.py:larger --eval_n 128 --eval_size 32",
    measures=MEASURES,
    panels=lab.SAMPLES | {"pass@128": "eval/pass@128"})

if __name__ == "__main__":
    lab.main(FINDING)
