"""Batch norms in eval into the weights of the layers beside them."""
