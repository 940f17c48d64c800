"""Compares the results of an implementation with cases.json. Plain Python, no packages.

    python tests/vectors/check.py results.json [tolerance]

results.json: {name of a case: {"advantages": ..., "weights": ..., "loss": ..., "gradient": ...}},
each in the shape that the case expects. Cases and fields may be left out; the last line counts what
was compared. tolerance: 1e-9 (default) for float64, 1e-4 for float32, times the largest number
expected in the field, but at least times 1e-3: the terms of a loss may cancel."""
import json
import sys
from pathlib import Path


def flat(x):
    return [number for part in x for number in flat(part)] if isinstance(x, list) else [x]


def difference(got, wanted):
    """The largest difference, as a fraction of the largest number that is wanted or of 1e-3."""
    got, wanted = flat(got), flat(wanted)
    if len(got) != len(wanted) or None in got + wanted:
        return 0.0 if got == wanted else float("inf")
    return max(abs(x - y) for x, y in zip(got, wanted)) / max(1e-3, *map(abs, wanted))


def main(file, tolerance=1e-9):
    cases = json.loads(Path(__file__).with_name("cases.json").read_text())
    cases = {case["name"]: case["expected"] for case in cases}
    try:
        results, tolerance = json.loads(Path(file).read_text()), float(tolerance)
        compared = [(name, field, difference(result[field], cases[name][field]))
                    for name, result in results.items() for field in result]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        sys.exit(f"check: {file}, tolerance {tolerance}: {type(e).__name__}: {e}")
    wrong = [x for x in compared if not x[2] <= tolerance]  # also catches NaN
    for name, field, size in wrong:
        print(f"{name}: {field} differs, {size:.1g} of its size")
    agree = len(compared) - len(wrong)
    print(f"{agree} of {len(compared)} results agree; {len(results)} of {len(cases)} cases")
    sys.exit(bool(wrong) or not compared)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) in (2, 3) else sys.exit(__doc__)
