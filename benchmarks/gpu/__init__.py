"""What a GPU shows in ten minutes: whether all is right on it, what it costs, and what is learned;
``make gpu``.
"""
