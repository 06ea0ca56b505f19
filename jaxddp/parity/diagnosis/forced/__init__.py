"""Where two programs of a loss differ: values are forced to be equal, until every difference is in one segment."""
