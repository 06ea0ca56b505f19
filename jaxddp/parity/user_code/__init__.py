"""Text of the user's files."""
