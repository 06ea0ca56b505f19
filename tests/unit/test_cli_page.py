"""docs/cli.md is what the commands print."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_the_command_line_is_what_the_commands_print() -> None:
    specification = importlib.util.spec_from_file_location("cli_page", DOCS / "cli.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert (DOCS / "cli.md").read_text() == module.page(), "docs/cli.md is old: run python docs/cli.py"
