"""What a run says of its evaluations, on the screen and in its model card."""
import re


def evaluation_text(metrics):
    """An evaluation as text: a line per set, and with several sets a last line with their mean."""
    prefixes = [name.removesuffix("accuracy") for name in metrics
                if name.startswith("eval/") and name.endswith("/accuracy")]  # eval/<set>/ and eval/
    overall = "mean" if len(prefixes) > 1 else "held-out"
    lines = []
    for prefix in prefixes:
        m = {name.removeprefix(prefix): x for name, x in metrics.items() if name.startswith(prefix)}
        detail = f"n = {m['n']}"
        if "low" in m:  # one set, and not the mean of several
            if m["n"] < m.get("of", 0):  # --eval_size or --max_prompt left out some
                detail = f"over {m['n']:,} of {m['of']:,.0f}"
            detail = f"95 % interval {m['low']:.1%} to {m['high']:.1%}, {detail}"
        line = (f"{prefix[5:-1] or overall}: accuracy {m['accuracy']:.1%} ({detail})"
                f", mean length {m['length']:.1f}")
        for name, share in m.items():
            if re.match(r"\w+@", name) or name == "unscored" and share:
                line += f", {name} {share:.1%}"
        lines.append(line)
    return "\n".join(lines)
