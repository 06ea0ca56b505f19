"""`python -m jaxddp.parity` is `jaxddp check`, and with the word compare `jaxddp compare`."""

import sys

from jaxddp.__main__ import main

if __name__ == "__main__":
    main(sys.argv[1:] if sys.argv[1:2] == ["compare"] else ["check", *sys.argv[1:]])
