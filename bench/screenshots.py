"""The pictures of docs/report.md: the report of a run in headless Chromium, and its curve.

    python nano_rlvr.py --name default && python bench/screenshots.py runs/default

Writes docs/images/report.png, report_rollouts.png, report_phone.png (dark) and curve.png.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT  # puts the repository on sys.path

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
CHROMIUM = next(filter(None, BROWSERS), None)
STATE = "#step=2&color=change"  # of the page: a step with right and wrong completions
# name -> width and height of the window, what is cut out of it (top and bottom), dark mode
PICTURES = {"report": (1200, 1060, (0, 1060), False),
            "report_rollouts": (1200, 2600, (1480, 2480), False),
            "report_phone": (500, 4700, (3380, 4340), True)}


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

    from runtime import report
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary) / "report.html"
        report.write([folder], page)
        for name, (width, height, (top, bottom), dark) in PICTURES.items():
            path, size = images / f"{name}.png", f"--window-size={width},{height}"
            browse(page.as_uri() + STATE, f"--screenshot={path}", size, dark=dark)
            Image.open(path).convert("RGB").crop((0, top, width, bottom)).save(path, optimize=True)
    report.write([folder], images / "curve.png")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not CHROMIUM:
        sys.exit(__doc__ if CHROMIUM else "screenshots: no chromium: apt-get install chromium")
    main(sys.argv[1])
