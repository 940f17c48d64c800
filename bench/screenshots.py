"""The pictures of docs/report.md and of README.md: the report of a run in headless Chromium.

    python nano_rlvr.py --model models/smollm2 --name products
    python -m bench.screenshots runs/products

Writes docs/images/report.png, report_rollouts.png, report_phone.png (dark), report_tokens.png (144
dpi), and the report itself as docs/reports/smollm2.html.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.common import ROOT

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
CHROMIUM = next(filter(None, BROWSERS), None)
STATE = "#step=2&color=change"  # of the page: a step with right and wrong completions
TOP = "body > :not(#rollouts)"  # what stands above the rollouts
LIST = f"{TOP}, #rollouts > :not(:last-child)"  # and the list of the rollouts
# name -> width and height of the window, what is hidden in it, dark mode, pixels per CSS pixel
PICTURES = {"report": (1200, 1500, "#rollouts", False, 1),
            "report_rollouts": (1200, 1000, TOP, False, 1),
            "report_phone": (500, 390, LIST, True, 1),
            "report_tokens": (900, 430, f"{LIST}, #token, form", False, 1.5)}


def browse(page, *flags, dark=False):
    """Opens a file in headless Chromium and returns what it prints, in virtual time."""
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, "--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
                   "--virtual-time-budget=20000", f"--user-data-dir={profile}", *flags]
        command += ["--no-sandbox"] * (os.geteuid() == 0)  # root has no sandbox
        command += ["--blink-settings=preferredColorScheme=0"] * dark
        done = subprocess.run([*command, page], check=True, capture_output=True, text=True,
                              timeout=120)
    return done.stdout


def main(folder, images=ROOT / "docs/images"):
    from PIL import Image

    from runtime.report import page as report
    images.mkdir(parents=True, exist_ok=True)
    example = images.parent / "reports/smollm2.html"
    report.write([folder], example)
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary) / "report.html"
        for name, (width, height, hidden, dark, scale) in PICTURES.items():
            style = f"<style>{hidden} {{ display: none !important }}</style>"
            page.write_text(example.read_text().replace("</head>", style + "</head>"))
            path, size = images / f"{name}.png", f"--window-size={width},{height}"
            browse(page.as_uri() + STATE, f"--screenshot={path}", size,
                   f"--force-device-scale-factor={scale}", dark=dark)
            picture = Image.open(path).convert("RGB")
            picture.save(path, optimize=True, dpi=(96 * scale, 96 * scale))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not CHROMIUM:
        sys.exit(__doc__ if CHROMIUM else "screenshots: no chromium: apt-get install chromium")
    main(sys.argv[1])
