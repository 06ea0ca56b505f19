"""Text of the user's files, and of what the report says of them."""
