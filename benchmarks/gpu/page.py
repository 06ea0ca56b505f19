"""Part `page`: README.md, index.html and the picture of a folder of results: `python -m benchmarks.gpu.page FOLDER`.

It can be made of any folder, also of one that lacks parts.
"""

import base64
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import goals, picture, records, runner, utilisation
from benchmarks.gpu.document import to_html, to_markdown
from benchmarks.gpu.part import options_of
from benchmarks.gpu.sections import headline, sections
from jaxddp import cli
from jaxddp.files import write_atomically

PICTURE = "picture.png"


def write(folder: Path) -> list[str]:
    """Write the page of a folder; return the lines of the targets."""
    read = {part: records.read(folder, part) for part in runner.PARTS if part != runner.PAGE}
    title = _title(read)
    png = picture.draw(utilisation.table(read["utilisation"], read["machine"]), title)
    parts = sections(read)
    data = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    write_atomically(folder / PICTURE, png)
    write_atomically(folder / "README.md", to_markdown(title, parts, PICTURE).encode())
    write_atomically(folder / "index.html", to_html(title, parts, data).encode())
    return headline(goals.rows(read))


def _title(read: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the device and the date, as far as the records know them."""
    row = read["machine"].get("rows", {}).get("jax", {})
    device = f"{row['count']} x {row['device']}" if "device" in row else "device not measured"
    date = read["machine"].get("date", "")
    return " · ".join(filter(None, ["jaxddp", device, date]))


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        options = options_of(runner.PAGE)
        print(*write(options.folder), sep="\n")
        page = {"part": runner.PAGE, "complete": True, "smoke": options.smoke}
        records.write(options.folder, runner.PAGE, page)
    sys.exit(0)
