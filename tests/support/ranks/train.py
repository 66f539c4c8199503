"""`trustbatch train`, as torchrun starts it."""

import sys

from trustbatch.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
