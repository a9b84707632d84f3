"""How the ranks of a worker group hold the model: whole, each of them, or in parts."""
