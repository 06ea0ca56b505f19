"""Texts stand for files while an edit is tried; the files stay as they are."""

from pathlib import Path

from jaxddp.parity.port.replaced_files import replace_files
from jaxddp.scripts import run_file


def test_texts_stand_for_the_port_and_modules_beside_it_until_the_next_call(tmp_path: Path) -> None:
    port, half, other = (tmp_path / f"{name}.py" for name in ("port", "half_of_a_port", "reader_of_a_half"))
    half.write_text("x = 1\n")
    other.write_text("from half_of_a_port import x\n\ny = 10 * x\n")
    port.write_text("from reader_of_a_half import y\n\nz = 1\n")

    def values() -> tuple[int, int]:
        module = run_file(port)
        return module.y, module.z

    assert values() == (10, 1)
    replace_files({str(half): "x = 2\n", str(port): "from reader_of_a_half import y\n\nz = 3\n"}, port)
    assert values() == (20, 3)
    assert half.read_text() == "x = 1\n"
    replace_files({}, port)
    assert values() == (10, 1)
