"""`tectum demo`: the main job on a small model, in two processes, checked against the model in one piece."""
