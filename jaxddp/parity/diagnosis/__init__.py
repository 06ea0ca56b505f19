"""From a difference to its cause: which known fault, planted in the reference, would do what the port does?"""
