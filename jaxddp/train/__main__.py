"""`python -m jaxddp.train` is `jaxddp train`."""

import sys

from jaxddp.__main__ import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
