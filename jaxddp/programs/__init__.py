"""Programs of the package: the trainers' program if they are given no file."""
