"""How the demo's model was made: the recipe, the training and the measurement. The model itself ships in `tectum.demo`."""
