"""Writes the report of one or several runs: one HTML file, which needs no network.

    python -m runtime.report runs/a                        writes runs/a/report.html, as a run does
    python -m runtime.report runs/a runs/b --out ab.html   several runs in one report
    python -m runtime.report runs/a runs/b --out ab.png    only reward, accuracy and length

A run is a line; bench/seeds.py has means over seeds. docs/report.md says how to read the report.
"""
import argparse
import sys
from pathlib import Path

from runtime.messages import first_line, plain
from runtime.report import page


def main(argv):
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", type=Path, help="default: report.html in the folder of one run")
    args = parser.parse_args(argv)
    if len(args.runs) > 1 and not args.out:
        parser.error("several runs need --out")
    out = args.out or Path(args.runs[0]) / "report.html"
    fits = out.suffix in (".html", ".png") and (out.is_file() or not out.exists())
    if args.out and not (fits and out.parent.is_dir()):
        sys.exit(f"report: --out {out}: must be a file that ends in .html or .png, "
                 "in a folder that exists")
    try:
        page.write(args.runs, out)
    except Exception as e:  # a damaged file can raise anything
        sys.exit(plain(f"report: {', '.join(args.runs)}: damaged, or not the folder of a run "
                       f"({first_line(e)})"))
    print(plain(f"{out}: {out.stat().st_size / 1e6:.2f} MB"))


if __name__ == "__main__":
    main(sys.argv[1:])
