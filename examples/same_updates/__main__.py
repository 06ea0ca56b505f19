"""`python -m examples.same_updates`"""

import sys

from examples.same_updates.program import main
from examples.same_updates.settings import Options
from jaxddp.cli import one_line_errors, parse_plain

with one_line_errors(show_traceback=False):
    sys.exit(main(parse_plain(Options, sys.argv[1:], "same_updates")) > 0)
