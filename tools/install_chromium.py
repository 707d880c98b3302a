"""Make sure that there is a Chromium, from the system's package manager: python tools/install_chromium.py."""

import os
import shutil
import subprocess
import sys

from browser import executable


def main() -> int:
    if executable():
        return 0
    if not shutil.which("apt-get") or os.geteuid() != 0:
        sys.exit(
            "no Chromium on the PATH, and it can only be installed here by root with apt-get; install chromium or "
            "google-chrome with your system's package manager"
        )
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment)
    packages = ["chromium", "fonts-dejavu-core"]
    subprocess.run(["apt-get", "install", "-y", "-qq", *packages], check=True, env=environment)
    return 0 if executable() else 1


if __name__ == "__main__":
    sys.exit(main())
