"""Make the tensors of a call or of a forward pass from a case, and the results that a kernel must give for them."""
