"""The model's side of the engine: the only files that touch parameters and buffers, sharded ones included."""
