"""Make the tensors of a call or a forward pass from a case, and compute the results that a right kernel gives for them."""
