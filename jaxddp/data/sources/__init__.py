"""Examples of any origin and size: arrays, files mapped from disk, and objects with a length and items."""

from jaxddp.data.sources.files import array_file, image_folder, parquet, token_file
from jaxddp.data.sources.source import Augment, Collate, Source, as_source, generator
from jaxddp.data.sources.stream import stream

__all__ = [
    "Augment",
    "Collate",
    "Source",
    "array_file",
    "as_source",
    "generator",
    "image_folder",
    "parquet",
    "stream",
    "token_file",
]
