"""The data of a run: loaders, samples, and the position in them."""
