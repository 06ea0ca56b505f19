"""Datasets, sources of data of any size, sampler, micro-batches and torch's random numbers, without a framework."""

from jaxddp.data.digits import digits
from jaxddp.data.sources import array_file, image_folder, parquet, token_file

__all__ = ["array_file", "digits", "image_folder", "parquet", "token_file"]
